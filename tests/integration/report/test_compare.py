import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.demos import equality_verdict
from rollmesh.cli.main import app
from rollmesh.report.audit_result import AuditResult
from rollmesh.report.compare import compare, describe_difference, print_comparison, spread_of
from rollmesh.report.recorded_run import RecordedRun
from rollmesh.report.report_file import write_comparison

from .made_run import answers_of

Arms = dict[str, list[Path]]


def made_arms(make_run: Callable[..., Path], folder: Path, gain: float = 0.32) -> Arms:
    """Three seeds of two schedules, whose gains differ by 0.02, 0.03 and 0.04 unless another one is given."""
    return {
        preset: [
            make_run(folder / f"{preset}-{s}", steps=8, seed=s, preset=preset, gain=gain + slope * s) for s in range(3)
        ]
        for preset, gain, slope in (("copris", gain, 0.03), ("sync", 0.30, 0.02))
    }


@pytest.fixture
def arms(tmp_path: Path, make_run: Callable[..., Path]) -> Arms:
    return made_arms(make_run, tmp_path)


def test_means_over_seeds_carry_their_standard_error_and_differences_are_paired_by_seed(arms: Arms) -> None:
    comparison = compare(arms)
    (difference,), (copris, _) = comparison.differences, comparison.arms
    assert comparison.score_name == "accuracy"
    assert copris.after is not None and copris.after.n == 3
    assert copris.after.mean == pytest.approx(0.39 + 0.35)
    assert copris.after.standard_error == pytest.approx(0.03 / np.sqrt(3))
    assert (difference.label, difference.baseline, difference.pairs) == ("copris", "sync", 3)
    assert difference.spread.mean == pytest.approx(0.03)
    assert difference.spread.standard_error == pytest.approx(0.01 / np.sqrt(3))
    assert "beyond 2 standard errors" in describe_difference(difference, "accuracy")
    out = io.StringIO()
    print_comparison(comparison, Console(file=out, width=160))
    text = out.getvalue()
    assert text.count("copris") >= 4 and text.count("sync") >= 4
    assert "0.740 ± 0.017" in text and "copris minus sync" in text


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
    assert "within 2 standard errors" in describe_difference(difference, "accuracy")


def test_unequal_updates_missing_audits_and_evaluations_are_noted(
    tmp_path: Path, arms: Arms, make_run: Callable[..., Path]
) -> None:
    short = make_run(tmp_path / "short", steps=5, seed=9)
    (short / "evaluations.jsonl").unlink()
    (tmp_path / "empty").mkdir()
    never_trained = compare({"copris": [tmp_path / "empty"], "sync": [tmp_path / "empty"]})
    assert never_trained.differences == ()
    print_comparison(never_trained, Console(file=io.StringIO()))
    notes = compare({**arms, "short": [short]}).notes
    assert any("different numbers of updates (5, 8)" in note for note in notes)
    assert any(note.startswith("not audited: copris seed 0") for note in notes)
    assert any("not evaluated" in note and "short seed 9" in note for note in notes)


def audited(arms: Arms, *, green: bool = True) -> Arms:
    """The runs, each with its audit."""
    for folder in (folder for folders in arms.values() for folder in folders):
        result = AuditResult(run=folder.name, committed_step=8, batch_files=8, green=green)
        (folder / "audit.json").write_text(result.to_json(), encoding="utf-8")
    return arms


@pytest.mark.parametrize(
    ("copris_gain", "equal", "said"),
    [
        (0.25, True, "within 5 points of sync at equal updates: -4.0 ± 0.6 points, the mean of 3 paired seeds"),
        (0.23, False, "NOT within 5 points of sync at equal updates: -6.0 ± 0.6 points"),
        (0.35, False, "NOT within 5 points of sync at equal updates: +6.0 ± 0.6 points"),
    ],
)
def test_the_verdict_is_about_the_paired_mean_in_either_direction(
    tmp_path: Path, make_run: Callable[..., Path], copris_gain: float, equal: bool, said: str
) -> None:
    is_equal, text = equality_verdict(compare(audited(made_arms(make_run, tmp_path, copris_gain))))
    assert (is_equal, text.startswith("copris is") and said in text) == (equal, True), text


def test_nothing_is_called_equal_without_green_audits_equal_updates_and_common_seeds(
    tmp_path: Path, arms: Arms, make_run: Callable[..., Path]
) -> None:
    assert "not audited: copris seed 0" in equality_verdict(compare(arms))[1]
    is_equal, text = equality_verdict(compare(audited(arms, green=False)))
    assert not is_equal and "audit NOT green: copris seed 0" in text
    one_pair = {label: folders[:1] for label, folders in audited(arms).items()}
    is_equal, text = equality_verdict(compare(one_pair))
    assert is_equal and text.endswith("+2.0 points, the mean of 1 paired seed, without a standard error")
    short = make_run(tmp_path / "short", steps=5, seed=0, preset="sync", gain=0.3)
    is_equal, text = equality_verdict(compare(audited({"copris": arms["copris"][:1], "sync": [short]})))
    assert not is_equal and "different numbers of updates (5, 8)" in text
    is_equal, text = equality_verdict(compare({"copris": arms["copris"][:1], "sync": arms["sync"][1:]}))
    assert not is_equal and "no seed in common" in text


def test_the_page_of_a_comparison_has_the_curves_of_every_run(arms: Arms, tmp_path: Path) -> None:
    runs = {path.name: path for paths in arms.values() for path in paths}
    series = answers_of(write_comparison(runs, tmp_path / "comparison.html"))["series"]
    assert [one["run"] for one in series["beside"]] == [RecordedRun(path).name for path in list(runs.values())[1:]]
    for run in (series, *series["beside"]):
        curves = {one["name"]: one for one in run["series"]}
        assert len(curves["outcome_mean"]["times"]) == 8
        tokens = curves["trained_token_total"]["mean"]
        assert len(tokens) == 8 and tokens == sorted(tokens)


def test_two_run_folders_are_compared_by_a_command(arms: Arms) -> None:
    copris, sync = arms["copris"][0], arms["sync"][0]
    shown = CliRunner().invoke(app, ["compare", str(copris), str(sync)], env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    rows = [line.split() for line in shown.stdout.splitlines() if line.strip().startswith(("copris-0", "sync-0"))]
    # label, seed, before, after, steps: 0.39 and the gain of the schedule
    assert [row[:5] for row in rows] == [
        ["copris-0", "0", "0.390", "0.710", "8"],
        ["sync-0", "0", "0.390", "0.690", "8"],
    ]
    assert "copris-0 minus sync-0, over 1 paired seed: +0.020; the noise of a single pair is unknown" in shown.stdout


@pytest.mark.parametrize("count", [1, 2])
def test_one_run_alone_is_no_comparison(arms: Arms, count: int) -> None:
    refused = CliRunner().invoke(app, ["compare", *[str(arms["sync"][0])] * count])
    assert refused.exit_code == 2 and "give two or more runs" in refused.stderr


def test_a_spread_leaves_out_what_is_unknown() -> None:
    spread = spread_of([1.0, None, float("nan"), 3.0])
    assert spread is not None and (spread.n, spread.mean, spread.standard_error) == (2, 2.0, 1.0)
