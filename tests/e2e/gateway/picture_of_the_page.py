"""Take the pictures of the page in docs/images, from a real run of the demo; for developers who change the page.

python -m tests.e2e.gateway.picture_of_the_page
"""

import io
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

from rollmesh.runtime.endpoints import read_endpoints

from ...kit.waiting import until
from .conftest import FLAGS

IMAGES = Path(__file__).parents[3] / "docs" / "images"
VIEW = {"width": 1280, "height": 724}
TRAIN_STEP = 16
"""Newest step of the run in the pictures."""
_STEP_SECONDS = 300.0
_COLOURS = 128


def take(browser: Browser, url: str) -> None:
    """Take one picture in each colour scheme, once the run has come far enough."""
    for scheme in ("light", "dark"):
        page = browser.new_context(viewport=VIEW, color_scheme=scheme).new_page()  # type: ignore[arg-type]
        page.goto(url)
        page.wait_for_function(
            "step => Number(document.querySelector('#facts dd')?.textContent) >= step",
            arg=TRAIN_STEP,
            timeout=1000 * _STEP_SECONDS,
        )
        page.wait_for_function("() => Number(document.documentElement.dataset.looks) >= 4")
        picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
        picture.quantize(_COLOURS, dither=Image.Dither.NONE).save(IMAGES / f"page-{scheme}.png", optimize=True)
        page.close()


def main() -> None:
    """Start a demo, take the pictures, and stop the demo."""
    executable = shutil.which("chromium")
    if executable is None:
        sys.exit("chromium is not installed: apt-get install chromium")
    with tempfile.TemporaryDirectory() as name, sync_playwright() as driver:
        folder = Path(name) / "demo"
        run = subprocess.Popen([sys.executable, "-m", "rollmesh.cli.main", "demo", "--folder", str(folder)])
        try:
            until(lambda: bool(read_endpoints(folder, "gateway")), "the gateway")
            browser = driver.chromium.launch(executable_path=executable, args=list(FLAGS))
            take(browser, read_endpoints(folder, "gateway")[0].url)
            browser.close()
        finally:
            run.send_signal(signal.SIGINT)
            run.wait()


if __name__ == "__main__":
    main()
