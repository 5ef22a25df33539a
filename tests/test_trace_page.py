"""The ``lookahead show`` page in headless Chromium: keys, screen-reader labels, phone width, bad traces."""

import functools
import http.server
import json
import re
import threading
from collections import Counter
from pathlib import Path

import pytest

import lookahead
from lookahead import NGramPool
from lookahead.cli.show import PAGE, page_of
from lookahead.trace import TraceWriter, read_trace

TRACES = Path(__file__).parent.parent / "docs" / "traces"
PROMPT = "def add(a, b):\n    return a + b\n</script>def add(a"


@pytest.fixture(scope="module")
def trace(toy_plain, tmp_path_factory):
    """A trace file of a completion with accepted drafts."""
    folder = tmp_path_factory.mktemp("trace")
    llm = lookahead.load(toy_plain, dtype="float32")
    with TraceWriter(folder / "t.jsonl", llm) as writer:
        for update in llm.run([PROMPT], max_new_tokens=60, ignore_eos=True, drafter="5,4,5"):
            writer.write(update)
    return folder / "t.jsonl"


@pytest.fixture
def opened(browser, tmp_path):
    """A function that opens a page with a trace; pages must have no errors and no network requests."""
    pages, problems, asked = [], [], []

    def open_page(text, width=1200, scheme="light", mark=""):
        file = tmp_path / "page.html"
        file.write_text(text, encoding="utf-8")
        page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(file.as_uri() + mark)
        pages.append(page)
        return page

    yield open_page
    assert problems == []
    assert all(url.startswith(("file:", "data:")) for url in asked), "it must work offline"
    for page in pages:
        page.close()


@pytest.fixture
def site_of():
    """A function that serves a folder, because file:// pages cannot access each other."""
    servers = []

    def serve(folder):
        handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder)
        servers.append(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


def said(page, name="say"):
    return page.locator(f"#{name}").inner_text()


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (390, "dark")])
def test_keys_replay_a_trace(opened, trace, width, scheme):
    read = read_trace(trace)
    steps = [json.loads(line) for line in read.lines[1:-1]]
    page = opened(page_of(read), width, scheme)
    assert said(page).startswith(f"Step 1 of {read.steps}, draft: the tree has {len(steps[1]['tree'])} rows.")
    at = next(k for k in range(6, read.steps) if len(steps[k]["path"]) > 1)
    for _ in range(at - 1):
        page.keyboard.press("PageDown")
    page.keyboard.press("ArrowRight")
    assert f"Step {at} of" in said(page)
    assert f"confirms {len(steps[at]['path']) - 1} drafted token" in said(page)
    assert page.locator("#rows .kept").count() == len(steps[at]["path"])
    page.keyboard.press("ArrowRight")
    pool = NGramPool(5)
    for record in steps[: at + 1]:
        for key, *rest in record.get("ngrams", []) + record.get("ngrams_of_text", []):
            pool.add(key, tuple(rest))
    stats = pool.stats()
    figures = f"{stats['continuations']} n-grams under {stats['keys']} tokens"
    assert figures in said(page, "pool-size")
    assert page.locator("#window polyline").count() == len(steps[at]["ngrams"])
    label = page.locator("#window").get_attribute("aria-label")
    assert "level 2:" in label
    assert "answers:" in label
    page.keyboard.press("End")
    assert f"Step {read.steps} of {read.steps}, observe" in said(page)
    for _ in range(3 * (read.steps - at)):
        page.keyboard.press("ArrowLeft")
    assert figures in said(page, "pool-size"), "the pool is the same on the way back"
    page.locator("#rows").focus()
    row = next(r for r in range(1, len(steps[at]["tree"])) if steps[at]["parents"][r] > 0)
    for _ in range(row):
        page.keyboard.press("ArrowDown")
    assert said(page, "sees").startswith(f"Row {row}, ")
    assert f", {steps[at]['parents'][row]} and itself." in said(page, "sees")
    assert page.locator("#rows").get_attribute("aria-activedescendant") == f"row{row}"
    page.locator("#row1").hover()
    assert said(page, "sees").startswith("Row 1, ")
    page.keyboard.press("Home")
    assert page.get_by_role("button", name="Back").is_disabled()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "it must not scroll sideways"
    unnamed = "[...document.querySelectorAll('input, button, [tabindex], [role=img], section')]"
    unnamed += (
        ".filter(e => !(e.ariaLabel || e.getAttribute('aria-labelledby') || e.textContent.trim())).length"
    )
    assert page.evaluate(unnamed) == 0
    ground, ink = page.evaluate(
        "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
    )
    dark = [sum(map(int, color[4:-1].split(","))) < 384 for color in (ground, ink)]
    assert dark == ([True, False] if scheme == "dark" else [False, True])


def test_an_adaptive_trace_shows_its_tree_and_its_sources(opened):
    """Instead of window and pool, it shows each drafted token's source and each source's totals so far."""
    read = read_trace(TRACES / "adaptive.jsonl")
    steps = [json.loads(line) for line in read.lines[1:-1]]
    at = next(k for k in range(10, read.steps) if len(steps[k]["path"]) > 1 and len(steps[k]["tree"]) > 4)
    page = opened(page_of(read), mark=f"#{at}.1")
    assert page.locator("#window-part").is_hidden()
    assert page.locator("#pool-part").is_hidden()
    names = page.locator("#tree text.soft").all_text_contents()
    expected = [
        f"{sources[0]} {probability:.2f}" if sources else "root"
        for sources, probability in zip(steps[at]["sources"], steps[at]["probabilities"], strict=True)
    ]
    assert names == expected
    assert page.locator("#tree .kept").count() == len(steps[at]["path"])
    accepted, guesses = Counter(), Counter()
    for record in steps[: at + 1]:
        for row, sources in enumerate(record.get("sources", [])):
            guesses.update(sources)
            accepted.update(sources if row in record["path"] else [])
    shown = page.locator("#sources").inner_text()
    for name in guesses:
        line = next(line for line in shown.splitlines() if line.startswith(f"{name}: "))
        assert f"{accepted[name]} token" in line, line
        assert f"of {guesses[name]} guess" in line, line
    page.keyboard.press("ArrowLeft")
    assert "guesses from" in said(page)
    assert page.locator("#tree .kept").count() == 0


def test_the_page_speaks_chinese(opened, trace):
    page = opened(page_of(read_trace(trace)), mark="?lang=zh#4.1")
    assert said(page).startswith("第 4 步（共 ")
    assert page.evaluate("document.documentElement.lang") == "zh"
    for name in ("title", "keys", "h-text", "h-window", "h-pool", "h-tree", "figures", "about", "sees"):
        assert re.search("[\u4e00-\u9fff]|n-gram 池", said(page, name)), name
    assert page.evaluate("Object.keys(WORDS.en).every(name => name in WORDS.zh)")
    assert "Noto Sans CJK" in page.evaluate("getComputedStyle(document.body).fontFamily")


@pytest.mark.parametrize(("width", "scheme"), [(1100, "light"), (380, "dark")])
def test_within_another_page_it_plays_until_it_is_touched(browser, trace, tmp_path, site_of, width, scheme):
    """The frame fits its content, takes the host's colours, and does not play if motion is to be reduced."""
    (tmp_path / "replay.html").write_text(page_of(read_trace(trace)), encoding="utf-8")
    (tmp_path / "host.html").write_text(
        f'<body style="color-scheme: {scheme}"><iframe src="replay.html#3" style="width: 100%"></iframe>'
    )
    address = f"{site_of(tmp_path)}/host.html"
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme="light")
    page.clock.install()
    page.goto(address)
    frame = page.frame_locator("iframe")
    frame.locator("#say", has_text="Step 3 of").wait_for()
    button, text = frame.locator("#play"), frame.locator("#say")
    assert button.get_attribute("aria-label") == "Pause (space)"
    page.clock.run_for(1600)
    assert ", verify:" in text.inner_text()
    page.clock.run_for(60_000)
    assert not text.inner_text().startswith("Step 3 of"), "it goes on"
    inside = page.frames[1]
    high = inside.evaluate("document.body.scrollHeight")
    assert page.locator("iframe").bounding_box()["height"] >= high, "nothing scrolls within the frame"
    assert inside.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert frame.locator("#mask-part").is_hidden()
    ground = inside.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, ground[4:-1].split(","))) < 384) == (scheme == "dark")
    frame.locator("#text").click()
    assert button.get_attribute("aria-label") == "Play (space)"
    before = text.inner_text()
    page.clock.run_for(60_000)
    assert text.inner_text() == before, "it stays where the reader stopped it"
    button.click()
    page.clock.run_for(10_000)
    assert text.inner_text() != before
    page.close()
    page = browser.new_page(reduced_motion="reduce")
    page.goto(address)
    page.frame_locator("iframe").locator("#say", has_text="Step 3 of").wait_for()
    assert page.frame_locator("iframe").locator("#play").get_attribute("aria-label") == "Play (space)"
    page.close()


def test_a_mark_in_the_address_chooses_the_step(opened, trace):
    page = opened(page_of(read_trace(trace)), mark="#4.2")
    assert said(page).startswith("Step 4 of")
    assert ", observe:" in said(page)


def test_bad_traces_are_named_and_the_page_keeps_what_it_has(opened, trace, tmp_path):
    page = opened(page_of(read_trace(trace)))
    whole, first = trace.read_text(encoding="utf-8"), said(page)
    lines = whole.splitlines(keepends=True)
    for text, message in [
        (
            whole.replace('"version": 1', '"version": 7', 1),
            "trace of version 7, and this page reads version 1",
        ),
        ("hello\n", "This is not a trace"),
        ("", "This is not a trace"),
    ]:
        (tmp_path / "bad.jsonl").write_text(text)
        page.locator("#file").set_input_files(tmp_path / "bad.jsonl")
        page.wait_for_function(
            "text => document.getElementById('notice').textContent.includes(text)", arg=message
        )
        assert said(page) == first, "the trace before is still there"
        page.locator("#file").set_input_files([])
    (tmp_path / "bad.jsonl").write_text("".join(lines[:9]) + lines[9][:30])
    page.locator("#file").set_input_files(tmp_path / "bad.jsonl")
    page.wait_for_function("document.getElementById('notice').textContent.includes('is cut off')")
    assert said(page).startswith("Step 1 of 7,")
    (tmp_path / "worse.jsonl").write_text("".join(lines[:6]) + "{]\n" + "".join(lines[7:]))
    page.locator("#file").set_input_files(tmp_path / "worse.jsonl")
    page.wait_for_function("!document.getElementById('notice').textContent.includes('is cut off')")
    page.keyboard.press("End")
    assert "Line 7 of the trace is damaged. The page has the 4 steps before it." in said(page, "notice")
    assert said(page).startswith("Step 4 of 4,")


def test_an_empty_page_asks_for_a_trace(opened):
    page = opened(PAGE.read_text(encoding="utf-8"))
    assert "open one below" in said(page, "notice")


def test_a_hundred_thousand_steps(opened, trace, tmp_path):
    header = {**json.loads(trace.read_text(encoding="utf-8").splitlines()[0]), "texts": {"5": "a", "6": "b"}}
    step = {
        "tokens": [5, 6],
        "path": [0, 1],
        "tree": [6, 5, 6],
        "parents": [-1, 0, 1],
        "window": [[0, 1], [2]],
    }
    lines = [json.dumps(header), '{"step": 0, "tokens": [6]}']
    lines += [json.dumps({"step": k, **step, "ngrams": [[5, 6, k % 90]]}) for k in range(1, 100_001)]
    lines.append('{"end": "length", "steps": 100000, "new_tokens": 200001}')
    (tmp_path / "long.jsonl").write_text("\n".join(lines))
    page = opened(page_of(read_trace(tmp_path / "long.jsonl")))
    page.keyboard.press("End")
    assert said(page).startswith("Step 100,000 of 100,000, observe")
    assert said(page, "figures").startswith(
        "200,001 tokens, the first by the prefill; 100,000 steps: 2.00 tokens per step"
    )
    page.keyboard.press("ArrowLeft")
    assert "verify" in said(page)
    assert said(page, "notice") == ""
