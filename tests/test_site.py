"""The site in headless Chromium, where Zensical (``make docs``), playwright and Chromium are installed."""

import functools
import http.server
import shutil
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

import pytest

from test_docs import module

ROOT = Path(__file__).parent.parent
PAGES = ["index.html", "start.html", "lesson/3-window.html", "reference/cli.html", "settings.html"]
#: Runs a command without any network, where a user may do that.
WITHOUT_NETWORK = ["unshare", "--map-root-user", "--net"]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The address of the site, built strictly and without a network, and served from a folder."""
    if find_spec("zensical") is None:
        pytest.skip("Zensical is not installed (make docs)")
    folder = tmp_path_factory.mktemp("site")
    module("site").gather(folder / "docs")
    settings = (ROOT / "mkdocs.yml").read_text()
    for theirs, here in [
        ("build/docs", "docs"),
        ("build/site", "out"),
        ("docs/runtime", f"{ROOT}/docs/runtime"),
    ]:
        assert theirs in settings
        settings = settings.replace(theirs, here)
    (folder / "mkdocs.yml").write_text(settings.replace("paths: [src]", f"paths: [{ROOT}/src]"))
    build = [sys.executable, "-m", "zensical", "build", "--strict"]
    if (
        shutil.which("unshare")
        and not subprocess.run([*WITHOUT_NETWORK, "true"], capture_output=True).returncode
    ):
        build = [*WITHOUT_NETWORK, *build]
    done = subprocess.run(build, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder / "out")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_a_first_build_without_a_network_says_so(tmp_path):
    """``make docs`` where pip reaches nothing: one line says what is missing, and the next build tries again."""
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    (tmp_path / ".ready").touch()
    done = subprocess.run(["make", "docs", f"VENV={tmp_path}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "must be installed first, which needs a network once; builds need none" in done.stdout
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


def test_the_search_finds_the_lesson(browser, site):
    page = browser.new_page()
    page.goto(f"{site}/index.html")
    page.wait_for_load_state("networkidle")  # the keys are there when the scripts are
    page.keyboard.press("Control+k")
    page.locator("input:visible").first.fill("diagonal")
    page.get_by_text("The answer completes the").last.wait_for(timeout=20_000)
    page.close()
