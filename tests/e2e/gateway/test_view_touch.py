"""Curves on a touch screen: a finger that moves sideways zooms, one that moves up scrolls the page."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from ...integration.report.made_run import make_run
from .conftest import NARROW, Window, viewing

Open = Callable[..., Window]

STEPS = 40


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with viewing(make_run(tmp_path_factory.mktemp("touch") / "run", steps=STEPS)) as found:
        yield found


def test_a_finger_zooms_sideways_and_scrolls_upwards(window: Open, link: str) -> None:
    opened = window(f"{link}#curves", viewport=NARROW, has_touch=True)
    page = opened.open(1)
    reward = page.locator("figure.chart", has_text="Reward").first
    reward.locator("path.mean[d*=L]").wait_for()
    box = reward.locator("svg").bounding_box()
    assert box is not None
    device = page.context.new_cdp_session(page)

    def touch(kind: str, *place: float) -> None:
        points = [{"x": place[0], "y": place[1]}] if place else []
        device.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    before = page.evaluate("scrollY")
    x, y = box["x"] + box["width"] * 0.5, box["y"] + box["height"] / 2
    touch("touchStart", x, y)
    for moved in range(10, 81, 10):
        touch("touchMove", x + moved, y)
    touch("touchEnd")
    reward.locator("svg[aria-label*='from step 18 to step 29']").wait_for()
    assert page.evaluate("scrollY") == before
    page.evaluate("document.getElementById('curves-reset').click()")  # without a scroll to the button
    reward.locator(f"svg[aria-label*='from step 1 to step {STEPS}']").wait_for()

    touch("touchStart", x, y)
    for moved in range(20, 301, 20):
        touch("touchMove", x + moved / 8, y - moved)
    touch("touchEnd")
    page.wait_for_function("before => scrollY > before", arg=before)
    assert page.locator("#curves-reset").is_hidden()
