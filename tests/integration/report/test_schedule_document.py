"""The committed docs/schedules.md and its pictures are those of the code, and the pictured runs those of the rules."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from docs.build.picture import COLOURS, draw
from docs.build.pictured_run import UPDATE_TICKS, UPDATES
from docs.build.schedules import PICTURES, figures_of, pictured, schedule_files
from rollmesh.scheduling.presets import PRESETS

DOCS = Path(__file__).parents[3] / "docs"
SVG = "{http://www.w3.org/2000/svg}"


def test_the_committed_document_and_pictures_are_those_of_the_code() -> None:
    remedy = "run: python -m docs.build.schedules"
    files = schedule_files()
    for name, text in files.items():
        assert (DOCS / name).read_text() == text, f"docs/{name}: {remedy}"
    committed = {file.relative_to(DOCS).as_posix() for file in (DOCS / PICTURES).iterdir()}
    assert committed == files.keys() - {"schedules.md"}, remedy


@pytest.mark.parametrize("preset", PRESETS)
def test_a_pictured_run_trains_whole_batches_within_the_staleness_bound(preset: str) -> None:
    run = pictured(preset)
    rules = run.schedule
    assert len(run.training) == UPDATES * UPDATE_TICKS
    assert len(run.cuts) in (UPDATES, UPDATES + 1)  # a batch may be cut in the tick that trains the last one
    trained = [t for t in run.trajectories.values() if t.staleness is not None]
    assert len(trained) == len(run.cuts) * rules.groups_per_batch * rules.group_size
    assert max(t.staleness for t in trained if t.staleness is not None) <= rules.max_staleness
    running = [t.tokens | t.dropped for t in run.trajectories.values()]
    assert max(sum(tick in ticks for ticks in running) for tick in range(run.ticks)) <= rules.pool_size


def test_sync_waits_for_the_longest_of_every_batch_and_for_the_update() -> None:
    run = pictured("sync")
    # The longest of the first eight lengths is 22, of the others 15; an update takes 12 ticks.
    assert run.cuts == [22, 49, 83, 110, 144, 171]
    assert run.ticks == 3 * (22 + 12 + 15 + 12)
    figures = figures_of(run)
    assert (figures.mean_staleness, figures.off_policy, figures.dropped) == (0, 0, 0)
    assert figures.trainer_idle == pytest.approx(1 - 72 / 183)
    assert figures.mean_running == pytest.approx(3 * (66 + 58) / 183)


def test_rollpacker_collects_the_late_groups_for_a_long_round() -> None:
    run = pictured("rollpacker")
    rounds = [after - before for before, after in pairwise(run.cuts)]
    # One of five groups is late in each short round, so the fifth round has the four late ones of before.
    assert rounds.index(max(rounds)) == 3
    assert figures_of(run).dropped > 0


@pytest.mark.parametrize(("preset", "segment"), [("ulorl", 3), ("kimi", 6)])
def test_a_trajectory_rests_after_a_segment_until_a_new_policy_or_until_all_rest(preset: str, segment: int) -> None:
    run = pictured(preset)
    rested = [t for t in run.trajectories.values() if t.rests]
    assert rested
    for trajectory in rested:
        written = trajectory.tokens | trajectory.dropped
        for tick in trajectory.rests.keys() - {tick + 1 for tick in trajectory.rests}:
            version = trajectory.rests[tick]
            assert tick - 1 in written
            assert sum(v == version for t, v in written.items() if t < tick) % segment == 0
        for tick in {tick + 1 for tick in trajectory.rests} - trajectory.rests.keys() & written.keys():
            others = (t.tokens | t.dropped for t in run.trajectories.values())
            assert written[tick] > trajectory.rests[tick - 1] or not any(tick - 1 in ticks for ticks in others)
    bars = ElementTree.fromstring(draw(run)).findall(f"{SVG}rect")
    assert sum(int(bar.get("width") or 0) for bar in bars if bar.get("height") == "1") == 6 * sum(
        len(t.rests) for t in rested
    )


def test_masked_tokens_are_dropped_and_the_others_stay_within_the_bound() -> None:
    run = pictured("copris_paper", "schedule.max_staleness=1", "schedule.on_stale=mask_old_segments")
    cut = [t for t in run.trajectories.values() if t.staleness is not None]
    assert max(t.staleness for t in cut if t.staleness is not None) == 1
    assert any(t.dropped and t.tokens for t in cut)


def test_a_picture_has_a_row_for_each_trajectory_and_a_line_for_each_cut() -> None:
    run = pictured("copris")
    picture = ElementTree.fromstring(draw(run))
    assert len(picture.findall(f"{SVG}path")) == len(run.cuts)
    background, *bars = picture.findall(f"{SVG}rect")
    heights = {bar.get("y") for bar in bars}
    assert len(heights) == 1 + sum(bool(t.tokens) for t in run.trajectories.values())
    assert {bar.get("fill") for bar in bars} <= set(COLOURS)
    assert float(background.get("width") or 0) >= max(
        float(bar.get("x") or 0) + float(bar.get("width") or 0) for bar in bars
    )
