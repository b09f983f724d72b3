"""`rollmesh view RUN --beside OTHER`: the curves of two runs in one chart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from ...integration.report.made_run import make_run
from .conftest import Window, viewing

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
    reward = page.locator("figure.chart", has_text="Reward").first
    reward.locator("path.mean.c1[d*=L]").wait_for()
    keys = reward.locator("figcaption .key").all_text_contents()
    assert [key.split()[0] for key in keys] == ["new", "old"]
    assert reward.locator("path.mean.c0").count() == reward.locator("path.mean.c1").count() == 1
    widths = reward.evaluate("node => [...node.querySelectorAll('g > path.mean')].map((p) => p.getBBox().width)")
    assert widths[1] < widths[0], "the run with fewer steps ends earlier"
    phases = page.locator("figure.chart", has_text="Time per phase")
    assert phases.locator("path.mean").count() == 8
    assert phases.locator("path.mean.beside").count() == 4
    assert "optimizer, old" in (phases.locator("figcaption .key").last.text_content() or "")


def test_the_time_axis_counts_from_the_start_of_each_run(window: Open, link: str) -> None:
    page = window(link).open(1)
    reward = page.locator("figure.chart", has_text="Reward").first
    reward.locator("path.mean.c1[d*=L]").wait_for()
    page.click("#curves-time")
    reward.locator("svg[aria-label*='by time since the start of each run']").wait_for()
    ends = (10 + SECONDS * STEPS, 10 + MORE_SECONDS * FEWER_STEPS)
    assert f"to after {ends[1] // 60:.0f} min {ends[1] % 60:.0f} s" in str(
        reward.locator("svg").get_attribute("aria-label")
    )
    widths = reward.evaluate("node => [...node.querySelectorAll('g > path.mean')].map((p) => p.getBBox().width)")
    assert widths[0] < widths[1], "the slower run ends later"


def test_a_position_and_the_numbers_name_the_values_of_both_runs(window: Open, link: str) -> None:
    page = window(link).open(1)
    reward = page.locator("figure.chart", has_text="Reward").first
    reward.locator("path.mean.c1[d*=L]").wait_for()
    reward.locator("svg").focus()
    page.keyboard.press("Home")
    first = reward.locator(".readout").text_content() or ""
    assert first.startswith("step 1, new ") and ", old " in first
    page.keyboard.press("End")
    last = reward.locator(".readout").text_content() or ""
    assert last.startswith(f"step {STEPS}, new ") and "old" not in last
    reward.locator("summary").click()
    rows = reward.locator("tbody tr")
    assert rows.count() == STEPS
    assert [cell.split(" ")[0] for cell in rows.last.locator("td").all_text_contents()] == ["step", "new", "old"]
    assert rows.first.locator("td").last.text_content() == ""


def test_two_runs_of_one_name_are_told_apart_by_the_folder(folders: tuple[Path, Path], tmp_path: Path) -> None:
    run, _ = folders
    other = make_run(tmp_path / run.name, steps=3)
    with viewing(run, "--beside", str(other)) as found:
        page = found.partition("?")[0]
        answer = httpx.get(f"{page}api/v1/series", params={"names": "loss"}).json()
        assert answer["beside"]["run"] == str(other)
        assert (len(answer["series"][0]["x"]), len(answer["beside"]["series"][0]["x"])) == (STEPS, 3)
