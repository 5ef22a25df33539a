"""Takes the lesson's pictures of the moving page: python docs/screenshots.py (needs playwright and Chromium)."""

import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright

HERE = Path(__file__).parent
#: (file, width and height, step) of each picture.
PICTURES = [("replay.png", (1120, 1180), "#16.1"), ("replay-phone.png", (390, 844), "#16.2")]

if __name__ == "__main__":
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for name, (width, height), step in PICTURES:
            page = browser.new_page(viewport={"width": width, "height": height})
            page.goto((HERE / "lesson" / "replay.html").as_uri() + step)
            page.screenshot(path=HERE / "images" / name)
        browser.close()
