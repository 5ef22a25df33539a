"""The page at / in a real browser: headless Chromium, where one is installed."""

import pytest

import lookahead
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
    page.get_by_role("textbox", name="Prompt").fill("def add(a, b):")
    page.locator("#method").select_option("lookahead")
    page.get_by_role("spinbutton", name="Tokens").fill("40")
    page.keyboard.press("Tab")
    page.get_by_role("spinbutton", name="Tokens").press("Enter")  # by keyboard alone
    status = page.get_by_role("status")
    page.wait_for_function("document.getElementById('say').textContent.includes('texts')", timeout=60_000)
    assert "Equal texts" in status.inner_text()
    expected = served.llm.generate("def add(a, b):", max_new_tokens=40).text
    for side in ("plain", "fast"):
        assert page.locator(f"#text-{side}").evaluate("e => e.textContent") == expected
    assert "40 tokens" in page.locator("#figures-fast").inner_text()
    assert "rows" in page.locator("#tree").get_attribute("aria-label")
    assert "on the mean" in page.locator("#chart").get_attribute("aria-label")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "it must not scroll sideways"
    for drawing in ("chart", "tree"):  # letters of 11 pixels, however narrow the page is
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
    page.get_by_role("textbox", name="API key").fill("x")
    page.get_by_role("spinbutton", name="Temperature").fill("0")
    page.locator("#kind").select_option("chat")
    page.get_by_role("button", name="Decode").click()
    page.wait_for_function("document.getElementById('say').textContent.includes('texts')", timeout=60_000)
    assert problems == []
    page.close()


def test_errors_are_shown_and_stop_works(browser, served):
    page = browser.new_page()
    page.goto(served.url)
    page.get_by_role("textbox", name="Prompt").fill("x " * 3000)
    page.get_by_role("button", name="Decode").click()
    page.wait_for_function(
        "document.getElementById('say').textContent.includes('must be shorter')", timeout=60_000
    )
    page.get_by_role("textbox", name="Prompt").fill("x")
    page.get_by_role("spinbutton", name="Tokens").fill("900")
    page.get_by_role("button", name="Decode").click()
    # In the page itself: the texts may have ended before a click from outside arrives.
    page.wait_for_function(
        "document.getElementById('text-plain').textContent.length > 5"
        " && (document.getElementById('stop').click(), true)",
        timeout=60_000,
    )
    page.wait_for_function("document.getElementById('say').textContent === 'Stopped.'", timeout=60_000)
    served.wait(lambda: served.server.loop.load_state == (0, 0))
    page.close()
