"""The page at / in a real browser: headless Chromium, if installed."""

import time

import httpx
import pytest

import lookahead
from lookahead.core.loop import Engine
from serving import serving
from toy import save


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = save(tmp_path_factory.mktemp("toy"), chat=True, max_position_embeddings=1024)
    llm = lookahead.load(folder, dtype="float32")
    with serving(llm) as running:
        yield running


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (390, "dark")])
def test_the_page_decodes_twice_and_shows_it(browser, served, width, scheme):
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    problems, asked = [], []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda line: problems.append(line.text) if line.type == "error" else None)
    page.on("request", lambda request: asked.append(request.url))
    page.goto(served.url)
    page.wait_for_function("document.getElementById('model').textContent.startsWith('Model: ')")
    page.get_by_role("tab", name="Compare").click()
    page.locator("#kind").select_option("text")
    page.get_by_role("textbox", name="Prompt").fill("def add(a, b):")
    page.locator("#method").select_option("lookahead")
    page.locator("#length").fill("40")
    page.keyboard.press("Tab")
    page.locator("#length").press("Enter")  # using only the keyboard
    status = page.get_by_role("status")
    page.wait_for_function(
        "document.getElementById('say').textContent.includes('completions')", timeout=60_000
    )
    assert "The completions are equal" in status.inner_text()
    expected = served.llm.generate("def add(a, b):", max_new_tokens=40).text
    for side in ("plain", "fast"):
        assert page.locator(f"#text-{side}").evaluate("e => e.textContent") == expected
    assert "40 tokens" in page.locator("#figures-fast").inner_text()
    assert "rows" in page.locator("#tree").get_attribute("aria-label")
    assert "on average" in page.locator("#chart").get_attribute("aria-label")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "it must not scroll sideways"
    for drawing in ("chart", "tree"):  # letters stay at 11 pixels, however narrow the page
        shown = page.evaluate(
            f"(e => e.getBoundingClientRect().width / e.viewBox.baseVal.width)(document.getElementById('{drawing}'))"
        )
        assert 0.99 < shown < 1.01, drawing
    assert all(url.startswith(served.url) for url in asked), "no outside resources"
    unnamed = page.evaluate(
        "[...document.querySelectorAll('input, select, textarea, button')]"
        ".filter(e => !(e.labels?.length || e.textContent)).length"
    )
    assert unnamed == 0
    ground, ink = page.evaluate(
        "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
    )
    dark = [sum(map(int, color[4:-1].split(","))) < 384 for color in (ground, ink)]
    assert dark == ([True, False] if scheme == "dark" else [False, True])
    page.locator("#method").select_option("adaptive")
    page.locator("#kind").select_option("chat")
    page.get_by_role("button", name="Decode").click()
    page.wait_for_function(
        "document.getElementById('say').textContent.includes('completions')", timeout=60_000
    )
    assert page.get_by_role("heading", name="Adaptive", exact=True).count() == 1
    earlier = page.locator("#earlier article")
    assert earlier.count() == 1, "the first completion stays for comparison"
    assert "1. Lookahead, text" in earlier.inner_text()
    assert earlier.locator("pre").evaluate("e => e.textContent") == expected
    assert problems == []
    page.close()


def test_the_first_view_suits_the_model(browser, served):
    """It shows the model's name, chat first for a chat model, and prompts in the text colour."""
    page = browser.new_page()
    page.goto(served.url)
    name = httpx.get(f"{served.url}/v1/models").json()["data"][0]["id"]
    page.wait_for_function("document.getElementById('model').textContent.startsWith('Model: ')")
    assert page.locator("#model").inner_text() == f"Model: {name}"
    assert page.locator("#kind option").all_inner_texts() == ["Chat", "Text"]
    assert page.locator("#kind").input_value() == "chat"
    chat = page.locator("#prompt").input_value()
    page.get_by_role("tab", name="Compare").click()
    page.locator("#kind").select_option("text")
    assert page.locator("#prompt").input_value() not in ("", chat), "each mode has its own example"
    page.locator("#prompt").fill("my own")
    page.locator("#kind").select_option("chat")
    assert page.locator("#prompt").input_value() == "my own"
    colors = "['prompt', 'model'].map(id => getComputedStyle(document.getElementById(id)).color)"
    prompt, text = page.evaluate(colors)
    assert prompt == text
    for part in ("body", "#prompt"):
        fonts = page.evaluate(f"getComputedStyle(document.querySelector('{part}')).fontFamily")
        assert "Noto Sans CJK" in fonts, f"{part} names fonts with Chinese, Japanese and Korean"
    page.close()


def test_a_model_without_a_chat_template_gets_a_text(browser, toy_plain):
    with serving(lookahead.load(toy_plain, dtype="float32")) as served:
        page = browser.new_page()
        page.goto(served.url)
        page.wait_for_function("document.getElementById('model').textContent.startsWith('Model: ')")
        assert page.locator("#kind").input_value() == "text"
        assert page.locator("#compare").is_visible()
        assert page.get_by_role("tab", name="Chat").is_disabled()
        assert page.locator("#kind option[value=chat]").is_disabled()
        page.close()


def test_the_page_asks_for_the_key(browser, toy_plain):
    with serving(lookahead.load(toy_plain, dtype="float32"), api_key="s3cret") as served:
        page = browser.new_page()
        page.goto(served.url)
        page.wait_for_function("document.getElementById('model').textContent.includes('API key')")
        page.locator("#key").fill("s3cret")
        page.locator("#key").blur()
        page.wait_for_function("document.getElementById('model').textContent.startsWith('Model: ')")
        page.close()


@pytest.mark.parametrize("width", [1280, 390])
def test_the_chart_is_as_wide_as_its_panel(browser, served, width):
    page = browser.new_page(viewport={"width": width, "height": 800})
    page.goto(served.url)
    page.get_by_role("tab", name="Compare").click()
    for count in (1, 5, 700):
        page.evaluate(f"chart(Array.from({{length: {count}}}, (_, i) => 1 + i % 7))")
        panel, last = page.evaluate(
            "[document.getElementById('chart'), [...document.querySelectorAll('#chart .bar')].at(-1)]"
            ".map(e => e.getBoundingClientRect().right)"
        )
        bars = page.locator("#chart .bar").count()
        room = page.locator("#chart").bounding_box()["width"] / bars
        assert panel - room < last <= panel + 0.1, (count, panel, last)
    labels = page.locator("#chart text").all_text_contents()
    assert labels[:3] == ["0", "4", "7"]
    assert labels[-3:] == [
        f"step {701 - bars}",
        "step 700",
        f"bars: tokens of each step, from step {701 - bars} on",
    ]
    assert page.locator("#chart text").first.evaluate("e => parseFloat(getComputedStyle(e).fontSize)") >= 12
    decode, stop = page.locator("#go").bounding_box(), page.locator("#stop").bounding_box()
    assert decode["y"] == stop["y"], "Stop is next to Decode"
    page.close()


def test_errors_are_shown_and_stop_works(browser, served, monkeypatch):
    step = Engine.step

    def slow_step(engine):
        """The toy decodes 900 tokens in a second, too fast for a browser on a busy machine to click Stop."""
        time.sleep(0.05)
        return step(engine)

    monkeypatch.setattr(Engine, "step", slow_step)
    page = browser.new_page()
    page.goto(served.url)
    page.get_by_role("tab", name="Compare").click()
    page.get_by_role("textbox", name="Prompt").fill("x " * 3000)
    page.get_by_role("button", name="Decode").click()
    page.wait_for_function(
        "document.getElementById('say').textContent.includes('maximum context length')", timeout=60_000
    )
    page.get_by_role("textbox", name="Prompt").fill("x")
    page.locator("#length").fill("900")
    page.get_by_role("button", name="Decode").click()
    page.wait_for_function("document.getElementById('text-plain').textContent.length > 5", timeout=60_000)
    page.locator("#stop").click()
    page.wait_for_function("document.getElementById('say').textContent === 'Stopped.'", timeout=60_000)
    served.wait(lambda: served.server.loop.load_state == (0, 0))
    # In the chat, what was answered before the stop stays; a question without an answer goes back.
    page.get_by_role("tab", name="Chat").click()
    page.get_by_role("textbox", name="Message").fill("x")
    page.keyboard.press("Enter")
    page.wait_for_function(
        "document.querySelector('#talk .assistant')?.textContent.length > 30", timeout=60_000
    )
    page.locator("#halt").click()
    page.wait_for_function("document.querySelector('#talk .figures').textContent.endsWith('stopped')")
    page.get_by_role("textbox", name="Message").fill("x " * 3000)
    page.keyboard.press("Enter")
    page.wait_for_function(
        "document.getElementById('chat-say').textContent.includes('maximum context length')", timeout=60_000
    )
    assert page.locator("#talk article").count() == 2
    assert page.locator("#words").input_value() == "x " * 3000
    page.close()


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_a_chat_goes_on_and_shows_its_steps(browser, served, width, scheme):
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    problems, bodies = [], []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: bodies.append(request.post_data_json) if request.post_data else None)
    page.goto(served.url)
    page.wait_for_function("document.getElementById('model').textContent.startsWith('Model: ')")
    page.locator("summary").click()
    page.get_by_role("textbox", name="System prompt").fill("be brief")
    page.locator("#warmth").fill("0")
    page.locator("#most").fill("20")
    for question in ("first", "second"):
        page.get_by_role("textbox", name="Message").fill(question)
        page.keyboard.press("Enter")
        page.wait_for_function("document.getElementById('halt').disabled", timeout=60_000)
    talk = [(one["role"], one["content"]) for one in bodies[-1]["messages"]]
    turns = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "first"}]
    answer = served.llm.generate(turns, max_new_tokens=20, drafter="off").text
    assert talk == [("system", "be brief"), ("user", "first"), ("assistant", answer), ("user", "second")]
    figures = page.locator("#talk .figures").first.inner_text()
    assert "20 tokens" in figures
    assert figures.endswith("cut off: the limit of tokens is reached")
    page.locator("#colours").check()
    assert page.locator("#talk .steps").first.evaluate("e => e.textContent") == answer
    spans = page.locator("#talk .steps span").all_text_contents()
    assert len(spans) > 3
    assert all(text == text.lstrip(" \n") for text in spans), "spaces before a step's text are not underlined"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "it must not scroll sideways"
    page.reload()
    assert page.locator("#talk article").count() == 4, "the conversation is kept"
    page.get_by_role("button", name="New chat").click()
    assert page.locator("#talk article").count() == 0
    assert problems == []
    page.close()


def test_markdown_is_shown_and_copied_and_never_read_as_html(browser, served):
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    page = context.new_page()
    page.goto(served.url)
    text = "# Title\n\n- one **bold**\n- `two`\n\n```python\na < b\n```\n<img src=x onerror=alert(1)> "
    text += "[a](javascript:x)\n1. x"
    shown = page.evaluate(
        "text => { const box = document.createElement('div'); box.append(markdown(text)); return box.innerHTML }",
        text,
    )
    assert shown == (
        "<h3>Title</h3><ul><li>one <strong>bold</strong></li><li><code>two</code></li></ul>"
        '<div class="code"><pre tabindex="0"><code>a &lt; b</code></pre>'
        '<button class="copy" type="button">Copy</button></div>'
        '<p>&lt;img src=x onerror=alert(1)&gt; [a](javascript:x)</p><ol start="1"><li>x</li></ol>'
    )
    page.evaluate(
        "talk = [{role: 'assistant', content: '**a**', pieces: []}]; show(talk[0]); $('talk').append(talk[0].card)"
    )
    page.locator("#talk .copy").click()
    page.wait_for_function("document.querySelector('#talk .copy').textContent === 'Copied'")
    assert page.evaluate("navigator.clipboard.readText()") == "**a**"
    context.close()
