"""`rollmesh view RUN --beside OTHER`: the curves of two runs in one chart, read, and zoomed with a finger."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ...integration.report.made_run import make_run
from .conftest import NARROW, Window, ask, expect, show_section, viewing

Open = Callable[..., Window]

STEPS, FEWER_STEPS = 40, 25
SECONDS, MORE_SECONDS = 5.0, 9.0
"""Per step: the run beside has fewer steps and takes longer."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("beside")
    return (
        make_run(folder / "new", steps=STEPS, seconds=SECONDS),
        make_run(folder / "old", steps=FEWER_STEPS, seed=1, gain=0.1, seconds=MORE_SECONDS),
    )


@pytest.fixture(scope="module")
def link(folders: tuple[Path, Path]) -> Iterator[str]:
    run, other = folders
    with viewing(run, "--beside", str(other)) as found:
        yield found


def test_curves_of_both_runs_have_their_names_and_styles(window: Open, link: str) -> None:
    page = window(link).open(1)
    entropy = page.locator("figure.chart", has_text="Entropy").first
    entropy.locator("path.mean.c1[d*=L]").wait_for()
    expect(entropy.locator("figcaption .key")).to_have_text([re.compile("^new "), re.compile("^old ")])
    expect(entropy.locator("path.mean.c0")).to_have_count(1)
    expect(entropy.locator("path.mean.c1")).to_have_count(1)
    widths = entropy.evaluate("node => [...node.querySelectorAll('g > path.mean')].map((p) => p.getBBox().width)")
    assert widths[1] < widths[0], "the run with fewer steps ends earlier"
    phases = page.locator("figure.chart", has_text="Time per phase")
    expect(phases.locator("path.mean")).to_have_count(8)
    expect(phases.locator("path.mean.beside")).to_have_count(4)
    expect(phases.locator("figcaption .key").last).to_contain_text("optimizer, old")


def test_the_time_axis_counts_from_the_start_of_each_run(window: Open, link: str) -> None:
    page = window(link).open(1)
    entropy = page.locator("figure.chart", has_text="Entropy").first
    entropy.locator("path.mean.c1[d*=L]").wait_for()
    page.click("#curves-time")
    end = 10 + MORE_SECONDS * FEWER_STEPS
    words = f"by time since the start of each run, .* to after {end // 60:.0f} min {end % 60:.0f} s;"
    expect(entropy.locator("svg")).to_have_attribute("aria-label", re.compile(words))
    widths = entropy.evaluate("node => [...node.querySelectorAll('g > path.mean')].map((p) => p.getBBox().width)")
    assert widths[0] < widths[1], "the slower run ends later"
    page.click("#curves-tokens")
    expect(entropy.locator("svg")).to_have_attribute(
        "aria-label", re.compile("by trained tokens, .* to after .* tokens;")
    )


def test_a_position_and_the_numbers_name_the_values_of_both_runs(window: Open, link: str) -> None:
    page = window(link).open(1)
    entropy = page.locator("figure.chart", has_text="Entropy").first
    entropy.locator("path.mean.c1[d*=L]").wait_for()
    entropy.locator("svg").focus()
    page.keyboard.press("Home")
    expect(entropy.locator(".readout")).to_have_text(re.compile("^step 1, new .*, old "))
    page.keyboard.press("End")
    expect(entropy.locator(".readout")).to_have_text(re.compile(f"^step {STEPS}, new ((?!old).)*$"))
    entropy.locator("summary").click()
    rows = entropy.locator("tbody tr")
    expect(rows).to_have_count(STEPS)  # filled by an event that follows the click
    expect(rows.last.locator("td")).to_have_text([re.compile(f"^{word} ") for word in ("step", "new", "old")])
    expect(rows.first.locator("td").last).to_have_text("")


def test_two_runs_of_one_name_are_told_apart_by_the_folder(folders: tuple[Path, Path], tmp_path: Path) -> None:
    run, _ = folders
    other = make_run(tmp_path / run.name, steps=3)
    with viewing(run, "--beside", str(other)) as found:
        page = found.partition("?")[0]
        answer = ask(f"{page}api/v1/series", params={"names": "loss"}).json()
        (beside,) = answer["beside"]
        assert beside["run"] == str(other)
        assert (len(answer["series"][0]["x"]), len(beside["series"][0]["x"])) == (STEPS, 3)


def test_a_finger_zooms_sideways_and_scrolls_upwards(window: Open, link: str) -> None:
    page = window(link, viewport=NARROW, has_touch=True).open(1)
    show_section(page, "Curves")
    entropy = page.locator("figure.chart", has_text="Entropy").first
    entropy.locator("path.mean.c0[d*=L]").wait_for()
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
