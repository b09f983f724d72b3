from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from rollmesh.report.compare import compare, difference_words, print_comparison, spread_of, write_comparison_plot
from rollmesh.report.plots.comparison import clocks
from rollmesh.report.recorded_run import RecordedRun
from rollmesh.report.series import train_series

Arms = dict[str, list[Path]]


@pytest.fixture
def arms(tmp_path: Path, make_run: Callable[..., Path]) -> Arms:
    """Three seeds of two schedules, whose gains differ by 0.02, 0.03 and 0.04."""
    return {
        preset: [
            make_run(tmp_path / f"{preset}-{s}", steps=8, seed=s, preset=preset, gain=gain + slope * s)
            for s in range(3)
        ]
        for preset, gain, slope in (("copris", 0.32, 0.03), ("sync", 0.30, 0.02))
    }


def test_the_mean_over_seeds_carries_its_standard_error(arms: Arms) -> None:
    comparison = compare(arms)
    assert comparison.score_name == "accuracy"
    copris = comparison.arms[0]
    assert copris.after is not None and copris.after.n == 3
    assert copris.after.mean == pytest.approx(0.39 + 0.35)
    assert copris.after.standard_error == pytest.approx(0.03 / np.sqrt(3))


def test_differences_are_paired_by_seed(arms: Arms) -> None:
    (difference,) = compare(arms).differences
    assert (difference.label, difference.baseline, difference.pairs) == ("copris", "sync", 3)
    assert difference.spread.mean == pytest.approx(0.03)
    assert difference.spread.standard_error == pytest.approx(0.01 / np.sqrt(3))
    assert "beyond 2 standard errors" in difference_words(difference, "accuracy")


def test_without_common_seeds_the_means_are_compared_and_their_errors_added(
    tmp_path: Path, make_run: Callable[..., Path]
) -> None:
    arms = {
        "copris": [make_run(tmp_path / f"a{s}", steps=4, seed=s, gain=0.3 + 0.1 * s) for s in (0, 1)],
        "sync": [make_run(tmp_path / f"b{s}", steps=4, seed=s, gain=0.3 + 0.1 * (s - 5)) for s in (5, 6)],
    }
    (difference,) = compare(arms).differences
    assert difference.pairs == 0
    assert difference.spread.mean == pytest.approx(0.0)
    assert difference.spread.standard_error == pytest.approx(np.hypot(0.05, 0.05))
    assert "within 2 standard errors" in difference_words(difference, "accuracy")


def test_one_seed_says_nothing_about_noise(arms: Arms) -> None:
    (difference,) = compare({label: folders[:1] for label, folders in arms.items()}).differences
    assert difference.spread.standard_error is None
    assert "says nothing about noise" in difference_words(difference, "accuracy")


def test_unequal_updates_missing_audits_and_evaluations_are_noted(
    tmp_path: Path, arms: Arms, make_run: Callable[..., Path]
) -> None:
    short = make_run(tmp_path / "short", steps=5, seed=9)
    (short / "evaluations.jsonl").unlink()
    notes = compare({**arms, "short": [short]}).notes
    assert any("different numbers of updates (5, 8)" in note for note in notes)
    assert any(note.startswith("not audited: copris seed 0") for note in notes)
    assert any("not evaluated" in note and "short seed 9" in note for note in notes)


def test_the_table_lists_every_run_and_both_means(arms: Arms) -> None:
    out = io.StringIO()
    print_comparison(compare(arms), Console(file=out, width=160))
    text = out.getvalue()
    assert text.count("copris") >= 4 and text.count("sync") >= 4
    assert "0.740 ± 0.017" in text
    assert "copris minus sync" in text


def test_a_comparison_of_runs_that_never_trained_is_possible(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    comparison = compare({"copris": [tmp_path / "empty"], "sync": [tmp_path / "empty"]})
    assert comparison.differences == ()
    print_comparison(comparison, Console(file=io.StringIO()))


def test_a_spread_leaves_out_what_is_unknown() -> None:
    assert spread_of([None, float("nan")]) is None
    spread = spread_of([1.0, None, 3.0])
    assert spread is not None
    assert (spread.n, spread.mean, spread.standard_error) == (2, 2.0, 1.0)


def test_clocks_count_updates_tokens_and_seconds(arms: Arms) -> None:
    series = train_series(RecordedRun(arms["copris"][0]).metrics.records)
    steps, tokens, seconds = clocks(series)
    assert steps.tolist() == list(range(1, 9))
    assert tokens[-1] == series.trained_tokens.sum()
    assert seconds[0] == pytest.approx(series.step_seconds[0])
    assert np.all(np.diff(seconds) == pytest.approx(5.0))


def test_the_comparison_is_drawn_as_svg_and_png(arms: Arms, tmp_path: Path) -> None:
    file = write_comparison_plot(arms, tmp_path / "out")
    assert "trained tokens" in file.read_text()
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
