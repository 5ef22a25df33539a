"""The site in headless Chromium, if Zensical (``make docs``), playwright and Chromium are installed."""

import functools
import http.server
import re
import shutil
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote

import pytest

from test_docs import module

ROOT = Path(__file__).parent.parent
PAGES = [
    "index.html",
    "start.html",
    "lesson/3-window.html",
    "reference/cli.html",
    "settings.html",
    "zh/index.html",
]
#: Runs a command without a network, where users are allowed to.
WITHOUT_NETWORK = ["unshare", "--map-root-user", "--net"]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder with both sites, built with --strict and without a network."""
    if find_spec("zensical") is None:
        pytest.skip("Zensical is not installed (make docs)")
    folder = tmp_path_factory.mktemp("site")
    module("site").gather(folder / "docs")
    for name in ("mkdocs.base.yml", "mkdocs.yml", "mkdocs.zh.yml"):
        settings = (ROOT / name).read_text().replace("build/site", "out").replace("build/docs", "docs")
        settings = settings.replace(": docs/theme", f": {ROOT}/docs/theme")
        (folder / name).write_text(settings.replace("paths: [src]", f"paths: [{ROOT}/src]"))
    build = [sys.executable, "-m", "zensical", "build", "--strict"]
    if (
        shutil.which("unshare")
        and not subprocess.run([*WITHOUT_NETWORK, "true"], capture_output=True).returncode
    ):
        build = [*WITHOUT_NETWORK, *build]
    for more in ([], ["-f", "mkdocs.zh.yml"]):
        done = subprocess.run([*build, *more], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "out"


@pytest.fixture(scope="module")
def site(built):
    """The address of the site."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=built)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_a_first_build_without_a_network_says_so(tmp_path):
    """``make docs`` when pip has no network: one line names what is missing, and the next build retries."""
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    (tmp_path / ".ready").touch()
    done = subprocess.run(["make", "docs", f"VENV={tmp_path}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "could not be installed; this needs a network connection once" in done.stdout
    assert not (tmp_path / ".docs").exists()


@pytest.mark.parametrize(("width", "scheme"), [(1300, "light"), (390, "dark")])
def test_pages_fit_and_ask_nobody_else(browser, site, width, scheme):
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    asked, problems = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: problems.append(str(error)))
    for name in PAGES:
        page.goto(f"{site}/{name}")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{name} scrolls sideways"
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, ground[4:-1].split(","))) < 384) == (scheme == "dark"), (name, ground)
    assert all(url.startswith((site, "data:", "blob:")) for url in asked), "no outside resources"
    assert problems == []
    page.close()


#: JavaScript for the right edge of an element, in pixels.
RIGHT = "name => document.querySelector(name).getBoundingClientRect().right"


@pytest.mark.parametrize(("home", "scheme"), [("index.html", "light"), ("zh/index.html", "dark")])
def test_the_home_page_shows_the_demo(browser, site, home, scheme):
    """It has the command and the figure above the animated page, which follows the colour scheme."""
    page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme=scheme)
    page.goto(f"{site}/{home}")
    article = page.locator("article")
    assert "lookahead demo" in article.locator("pre").first.inner_text()
    assert article.locator("img").evaluate("image => image.complete && image.naturalWidth > 0")
    frame = page.locator("iframe.animated")
    assert article.locator("img").bounding_box()["y"] < frame.bounding_box()["y"]
    frame.scroll_into_view_if_needed()  # it moves while it is seen
    inside = page.frame_locator("iframe.animated")
    first = inside.locator("#say").inner_text()
    page.wait_for_function(
        "text => document.querySelector('iframe').contentDocument.getElementById('say').textContent !== text",
        arg=first,
        timeout=20_000,
    )
    ground = page.frames[1].evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, ground[4:-1].split(","))) < 384) == (scheme == "dark")
    page.locator("label[for^=__palette]:visible").click()
    page.wait_for_function(
        "ground => getComputedStyle(document.querySelector('iframe').contentDocument.body)"
        ".backgroundColor !== ground",
        arg=ground,
    )
    assert page.evaluate(RIGHT, "article") > 1200, "no blank right quarter"
    assert page.evaluate(RIGHT, ".md-search__button") > 1150
    other = page.locator(".site-language")
    assert other.inner_text() == ("English" if home.startswith("zh") else "中文")
    other.click()
    assert page.url == f"{site}/{'index.html' if home.startswith('zh') else 'zh/index.html'}"
    page.close()


def test_the_chinese_home_is_in_chinese(browser, site):
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(f"{site}/zh/index.html")
    assert page.evaluate("document.documentElement.lang") == "zh"
    inside = page.frame_locator("iframe.animated")
    shown = [
        *page.locator(
            ".md-tabs__link, .md-search__button, .md-nav--primary a:visible, h2, article > p"
        ).all_inner_texts(),
        *(
            inside.locator(f"#{name}").inner_text()
            for name in ("say", "h-window", "window-help", "figures", "whole")
        ),
    ]
    assert len(shown) > 12
    for text in shown:
        assert re.search("[\u4e00-\u9fff]", text), text
    assert page.locator("article img").get_attribute("src").endswith("speed.zh.svg")
    page.close()


def test_no_button_lies_over_a_table_or_code_of_a_phone(browser, site):
    page = browser.new_page(viewport={"width": 390, "height": 844})
    for name in (*PAGES, "results/same-text.html", "server.html", "engines.html", "zh/glossary.html"):
        page.goto(f"{site}/{name}")
        page.wait_for_load_state("networkidle")
        over = page.evaluate(
            """() => {
            const box = e => e.getBoundingClientRect(), found = [];
            const buttons = [...document.querySelectorAll("main button, main label")].filter(e => box(e).width);
            for (const part of document.querySelectorAll("article table, article pre")) for (const e of buttons) {
              const a = box(e), b = box(part);
              const beside = a.left >= b.right || a.right <= b.left || a.top >= b.bottom || a.bottom <= b.top;
              if (!beside) found.push(e.className);
            }
            return found; }"""
        )
        assert over == [], name
    page.close()


def test_tables_of_results_fit_on_a_phone(browser, site):
    page = browser.new_page(viewport={"width": 390, "height": 844})
    names = sorted(path.stem for path in (ROOT / "docs/results").glob("*.md"))
    assert len(names) >= 10
    for name in names:
        page.goto(f"{site}/results/{name}.html")
        wide = page.evaluate(
            """() => [...document.querySelectorAll('article table')]
            .filter(table => table.getBoundingClientRect().right > innerWidth)
            .map(table => table.querySelector('tr').innerText)"""
        )
        assert wide == [], name
        items = page.locator("#how-it-was-measured ~ ul > li")
        assert items.count() >= len(re.findall(r"^- `", (ROOT / f"docs/results/{name}.md").read_text(), re.M))
    page.close()


def test_links_between_the_languages_lead_somewhere(site, built):
    """Zensical checks links within a site; this checks links between the sites, including anchors."""
    pages = {path: path.read_text(encoding="utf-8") for path in built.rglob("*.html")}
    seen = 0
    for path, text in pages.items():
        article = text.partition("<article")[2].partition("</article>")[0] + "".join(
            re.findall(r"<a [^>]*site-language.*?>", text)
        )
        for link in re.findall(r'(?:href|src)="([^"#?]*)(?:\?lang=zh)?(?:#([^"]*))?"', article):
            address, mark = link[0], unquote(link[1])
            if not address or address.startswith(("http", "mailto:", "/")):
                continue
            there = (path.parent / unquote(address)).resolve()
            assert there.exists(), f"{path.relative_to(built)}: {address}"
            if mark and there in pages and "replay" not in there.name:
                assert f'id="{mark}"' in pages[there], f"{path.relative_to(built)}: {address}#{mark}"
            seen += (built / "zh" in there.parents) != (built / "zh" in path.parents)
    assert seen > 150


def test_the_search_finds_the_lesson(browser, site):
    page = browser.new_page()
    page.goto(f"{site}/index.html")
    page.wait_for_load_state("networkidle")  # keys work once the scripts have loaded
    page.keyboard.press("Control+k")
    page.locator("input:visible").first.fill("diagonal")
    page.get_by_text("The answer completes the").last.wait_for(timeout=20_000)
    page.close()
