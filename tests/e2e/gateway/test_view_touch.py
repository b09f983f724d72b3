"""Curves on a touch screen: a finger that moves sideways zooms, one that moves up scrolls the page."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from ...integration.report.made_run import make_run
from .conftest import NARROW, Window, expect, show_section, viewing

Open = Callable[..., Window]

STEPS = 40


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with viewing(make_run(tmp_path_factory.mktemp("touch") / "run", steps=STEPS)) as found:
        yield found


def test_a_finger_zooms_sideways_and_scrolls_upwards(window: Open, link: str) -> None:
    page = window(link, viewport=NARROW, has_touch=True).open(1)
    show_section(page, "Curves")
    entropy = page.locator("figure.chart", has_text="Entropy").first
    entropy.locator("path.mean[d*=L]").wait_for()
    device = page.context.new_cdp_session(page)

    def touch(kind: str, *place: float) -> None:
        points = [{"x": place[0], "y": place[1]}] if place else []
        device.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    def drag(right: float, up: float) -> None:
        """Move a finger from the middle of the chart."""
        entropy.locator("svg").scroll_into_view_if_needed()
        box = entropy.locator("svg").bounding_box()
        assert box is not None
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        touch("touchStart", x, y)
        for part in range(1, 11):
            touch("touchMove", x + right * part / 10, y - up * part / 10)
        touch("touchEnd")

    drag(80, 0)
    entropy.locator("svg[aria-label*='from step 18 to step 29']").wait_for()
    page.evaluate("document.getElementById('curves-reset').click()")  # without a scroll to the button
    entropy.locator(f"svg[aria-label*='from step 1 to step {STEPS}']").wait_for()

    before = page.evaluate("scrollY")
    drag(20, 300)
    page.wait_for_function("before => scrollY > before", arg=before)
    expect(page.locator("#curves-reset")).to_be_hidden()
