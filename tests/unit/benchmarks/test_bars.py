"""A figure on the wrong side of its bar ends ``--check`` with status 1; run files of the simulator check."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.frame import Bar, Measure, at_least, at_most, compared, missed, run_command
from benchmarks.processes import write_run_file
from benchmarks.sim_check import ARMS, CELLS, run, run_file
from rollmesh.errors import ConfigError

BARS = (at_least("ratio", 0.25), at_least("value", 1000.0))


def lives(rate: float, bare: float) -> Measure:
    return compared("lives", rate, "1/s", "bare stream", bare, BARS)


@pytest.mark.parametrize(
    ("bar", "value", "reached"),
    [
        (at_least("value", 2.5), 2.5, True),
        (at_least("value", 2.5), 2.4999, False),
        (at_most("value", 1.2), 1.2, True),
        (at_most("value", 1.2), 1.2001, False),
        (at_most("value", 1.2), float("nan"), False),
        (at_least("ratio", 0.0), 5.0, False),
    ],
)
def test_a_bar_is_reached_by_what_equals_it_and_never_by_what_is_not_known(
    bar: Bar, value: float, reached: bool
) -> None:
    assert bar.reached_by(Measure(name="m", value=value, unit="u")) is reached


def test_each_missed_bar_is_named_with_what_was_measured() -> None:
    assert missed([lives(4000.0, 16_000.0), Measure(name="without a bar", value=0.0, unit="u")]) == []
    assert missed([lives(900.0, 36_000.0)]) == [
        "lives: ratio 0.025, the bar is >= 0.25",
        "lives: value 900, the bar is >= 1,000",
    ]
    assert missed([lives(2000.0, 0.0)]) == ["lives: ratio unknown, the bar is >= 0.25"]


@pytest.mark.parametrize(("rate", "status"), [(4000.0, 0), (900.0, 1)])
@pytest.mark.parametrize("as_json", [False, True])
def test_only_with_check_does_a_missed_bar_end_the_command_with_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rate: float, status: int, as_json: bool
) -> None:
    def bench(*options: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["bench", *options, *(["--json"] if as_json else [])])
        with pytest.raises(SystemExit) as ended:
            run_command(lambda: [lives(rate, 2000.0)], "bench", None)
        return (ended.value.code, *capsys.readouterr())

    assert bench()[0] == 0
    code, out, error = bench("--check")
    assert code == status
    assert ("missed: lives: value 900, the bar is >= 1,000" in error) is bool(status)
    if as_json:
        assert set(json.loads(out)) == {"name", "value", "unit", "baseline", "baseline_value", "ratio"}
    else:
        assert ("MISSED" in out) is bool(status)


@pytest.mark.parametrize(("words", "status"), [(["--help"], 0), (["trian"], 1), (["train", "--help"], 0)])
def test_the_help_names_the_benches_and_the_options_of_one(words: list[str], status: int) -> None:
    done = subprocess.run([sys.executable, "-m", "benchmarks", *words], capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    assert ("--check" in done.stdout) and ("sglang" in done.stdout) is (words[0] != "train")


@pytest.mark.parametrize("arm", ["sync", *ARMS])
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_every_arm_has_a_run_file_that_is_read_back(tmp_path: Path, arm: str, cell) -> None:
    config = write_run_file(tmp_path / "run.yaml", run_file(arm, cell, 3, 8, tmp_path / "run"))
    assert (config.schedule.preset, config.seed, config.trainer.train_steps) == (arm, 3, 9)
    assert (config.generator.pace is not None) == cell.is_paced
    assert (config.generator.on_new_version == "keep_kv") == (arm == "pipeline")
    assert (config.trainer.algorithm.loss == "decoupled_ppo") == (arm == "areal")


@pytest.mark.parametrize(("arm", "reason"), [("nosuch", "known are .*copris"), ("sync", "calibrated")])
def test_an_arm_that_cannot_be_predicted_is_refused_before_the_first_run(tmp_path: Path, arm: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"--arm {arm}: .*{reason}"):
        run(arm=["copris", arm], output=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
