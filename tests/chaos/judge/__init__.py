"""Outside judge of a run: it reads only the files of the run folder, with code that no service shares.

``rollmesh audit`` uses the mesh's own readers, model and scorer, so a fault in one of them could affect both. This
package imports no other package of rollmesh (a contract of import-linter). It has its own decoder, ledger, scoring by
transformers' plain forward pass, and replay of one train step. ``python -m tests.chaos.judge RUN_FOLDER`` judges any
float32 run whose run file sets ``schedule.max_staleness``; a copy of its bucket is a second argument.
"""

from dataclasses import dataclass
from pathlib import Path

from .files import RunFiles, read_run
from .scores import GAP_NATS, REPLAY_SHARE, largest_gap, one_thread, replay_distance, sampled
from .trained_groups import TrainedGroups, examine

LEAST_SCORED_SHARE = 0.5
"""Share of the sampled tokens that must be scored; the policies of the other tokens may be pruned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Result of the judge."""

    problems: tuple[str, ...]
    """Checks that failed, in words."""
    committed: int
    """Train step of the newest sound trainer state."""
    trajectories: int
    scored_tokens: int
    largest_gap: float
    """Largest gap of a scored token, in nats."""
    replay_distance: float | None
    """Distance of the replayed step, as a share of its update; None if no step could be replayed."""

    @property
    def sound(self) -> bool:
        """True if no check failed."""
        return not self.problems


def judge(folder: Path, sequences_per_step: int = 4, *, checkpoints: Path | None = None) -> Judgement:
    """Judge a run folder and score ``sequences_per_step`` sequences of each train step.

    ``checkpoints`` is a copy of the bucket of a run with an object store. Raises OSError if it is not a run folder.
    """
    run = read_run(folder, checkpoints)
    ledger = examine(run)
    problems = [*ledger.problems]
    with one_thread():
        gap, scored = _gap(run, ledger, sequences_per_step, problems)
        distance = _replay(run)
    if distance is not None and not distance <= REPLAY_SHARE:
        problems.append(f"a replayed step is {distance:.3g} of its update from the published weights")
    return Judgement(
        problems=tuple(problems),
        committed=ledger.committed,
        trajectories=sum(len(list(batch.trajectories)) for batch in run.batches.values()),
        scored_tokens=scored,
        largest_gap=gap,
        replay_distance=distance,
    )


def _gap(run: RunFiles, ledger: TrainedGroups, sequences_per_step: int, problems: list[str]) -> tuple[float, int]:
    """Score the sample; return (largest gap, number of scored tokens) and append to ``problems``."""
    worst, scored, tokens = 0.0, 0, 0
    folders = {p.record["policy_version"]: p.folder for p in run.policies if not p.damage}
    for version, sample in sorted(sampled(run, ledger.committed, sequences_per_step).items()):
        count = sum(len(segment.token_ids) for _, _, segment in sample)
        tokens += count
        if version in folders:
            gap = largest_gap(folders[version], sample)
            worst, scored = max(worst, gap), scored + count
            if gap > GAP_NATS:
                problems.append(f"policy version {version}: a log-probability is {gap:.3g} nats from its checkpoint")
    if scored < LEAST_SCORED_SHARE * tokens or not tokens:
        problems.append(f"{scored} of {tokens} sampled tokens could be scored")
    return worst, scored


def _replay(run: RunFiles) -> float | None:
    """Replay the step after the oldest suitable state; None if there is no such state."""
    published = {p.record["train_step"]: p.folder for p in run.policies if not p.damage}
    for state in run.states:
        step = state.train_step + 1
        if not state.damage and step in run.batches and step in published:
            distance = replay_distance(state, run.batches[step], published[step])
            if distance is not None:
                return distance
    return None
