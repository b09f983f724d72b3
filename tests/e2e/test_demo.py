"""The demo as a user starts it, unreduced: what it promises is counted from the files that it leaves."""

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.launcher.run_folder import RunFolder
from rollmesh.report.audit import open_checkpoints
from rollmesh.report.recorded_run import RecordedRun
from rollmesh.store import EmbeddedServer
from rollmesh.types import Batch

from .conftest import CommandLine, assert_rescored

MOST_BEFORE, LEAST_AFTER = 0.45, 0.65
LEAST_VERSIONS = 30
LEAST_OFF_POLICY = 0.1
_DEMO_SECONDS = 1400.0
"""Two minutes on two idle cores; these may be slow, and other tests run beside it."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(_DEMO_SECONDS + 200)]


@dataclass(frozen=True, kw_only=True)
class Demo:
    """A demo that has ended."""

    line: CommandLine
    status: int
    output: str
    checkpoints: CheckpointStore

    def scores(self) -> list[tuple[int, float]]:
        """(answers, accuracy) of every evaluation, in order."""
        return [(e["n"], e["mean"]) for e in self.line.json_lines("evaluations.jsonl")]

    def batches(self) -> list[Batch]:
        """Read the trained batches from the batch files."""
        return [self.checkpoints.read_batch(step) for step in self.checkpoints.batch_steps()]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    """``rollmesh demo`` in an empty folder, as ``make demo`` runs it."""
    parent = tmp_path_factory.mktemp("demo")
    line = CommandLine(run_file=parent / "run.yaml", folder=parent / "run")
    process = line.start("demo", "--folder", str(line.folder))
    try:
        output, _ = process.communicate(timeout=_DEMO_SECONDS)
        checkpoints = open_checkpoints(RecordedRun(line.folder))
        yield Demo(line=line, status=process.returncode, output=output, checkpoints=checkpoints)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        pytest.fail(f"the demo did not end within {_DEMO_SECONDS:.0f} s:\n{output}")
    finally:
        EmbeddedServer(RunFolder(line.folder).redis).kill()


def test_the_demo_raises_the_accuracy_from_below_045_to_above_065(demo: Demo) -> None:
    assert demo.status == 0, demo.output
    (asked, before), (asked_again, after) = demo.scores()
    assert asked == asked_again == 256
    assert before <= MOST_BEFORE, demo.output
    assert after >= LEAST_AFTER, demo.output


def test_the_demo_publishes_thirty_versions_and_trains_tokens_of_older_ones(demo: Demo) -> None:
    published = {r.policy_version: r.train_step for r in demo.checkpoints.complete_policies(announced_only=True)}
    assert len(published) >= LEAST_VERSIONS
    ages = [
        (batch.train_step - 1 - published[segment.policy_version], len(segment))
        for batch in demo.batches()
        for group in batch.groups
        for trajectory in group.trajectories
        if trajectory.outcome is not None
        for segment in trajectory.segments
    ]
    assert min(age for age, _ in ages) >= 0
    trained = sum(tokens for _, tokens in ages)
    assert sum(tokens for age, tokens in ages if age > 0) >= LEAST_OFF_POLICY * trained > 0


def test_the_demo_loses_nothing_and_trains_nothing_twice(demo: Demo) -> None:
    committed = max(int(file.parent.name[:8]) for file in demo.line.folder.glob("checkpoints/states/*/COMMITTED"))
    batches = demo.batches()
    assert [batch.train_step for batch in batches] == list(range(1, committed + 1))
    groups = [group.group_id for batch in batches for group in batch.groups]
    assert len(groups) == len(set(groups)) == 16 * committed
    audit = demo.line.audit()
    assert (audit["damaged"], audit["staleness_unknown"]) == ({}, 0)
    assert (audit["committed_step"], audit["groups"]) == (committed, len(groups))
    assert_rescored(audit)
    rescoring = audit["rescoring"]
    assert (rescoring["skipped_segments"], rescoring["skipped_impure_segments"]) == (0, 0), "no token is left out"


def test_the_report_and_the_summary_of_the_demo_name_both_accuracies(demo: Demo) -> None:
    report = (demo.line.folder / "report.html").read_text()
    for _, score in demo.scores():
        assert f"{score:.3f}" in report
        assert f"{score:.3f}" in demo.output
    assert "The audit is green" in report
    summary = re.sub(r"\s+", " ", demo.output)
    assert "Accuracy on the evaluation prompts" in summary and "a gain of" in summary
    assert str(Path(demo.line.folder) / "report.html") in demo.output
