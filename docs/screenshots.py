"""Takes the pictures of the animated page and of the server's page (needs playwright and Chromium).

python docs/screenshots.py                          the animated page
python docs/screenshots.py http://127.0.0.1:8000    the page of a running lookahead serve
"""

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

HERE = Path(__file__).parent
#: (file, width and height, step) of each picture of the animated page.
PICTURES = [("replay.png", (1120, 1180), "#16.1"), ("replay-phone.png", (390, 844), "#16.2")]


def animated_page(browser):
    """The pictures of one step."""
    for name, (width, height), step in PICTURES:
        page = browser.new_page(viewport={"width": width, "height": height})
        page.goto((HERE / "lesson" / "replay.html").as_uri() + step)
        page.screenshot(path=HERE / "images" / name)


def server_page(browser, address):
    """The picture of a completion with each of two methods."""
    page = browser.new_page(viewport={"width": 1100, "height": 900})
    page.goto(address)
    page.wait_for_function("document.getElementById('model').textContent.startsWith('Model: ')")
    page.get_by_role("tab", name="Compare").click()
    for method in ("lookahead", "adaptive"):
        page.locator("#method").select_option(method)
        page.locator("#go").click()
        page.wait_for_function("!document.getElementById('go').disabled", timeout=120_000)
    page.screenshot(path=HERE / "images" / "server-page.png", full_page=True)


if __name__ == "__main__":
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        if sys.argv[1:]:
            server_page(started, sys.argv[1])
        else:
            animated_page(started)
        started.close()
