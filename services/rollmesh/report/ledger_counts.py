"""The ledger part of an audit: what batch files and committed trainer states say, without asking Redis.

What the queue knows (which groups still live in it, which left and why) comes in as a ``QueueAccount``; without one,
nothing is said about lost groups.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.errors import CheckpointError
from rollmesh.mesh import Cursor
from rollmesh.types import Batch, PolicyRecord, Segment, SegmentSource, Trajectory

_GROUP_ID = re.compile(r"^e(\d+)-(\d+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueAccount:
    """What the trajectory queue knows about groups that are in no batch file."""

    live: Collection[str]
    """Groups that are open, ready or cut."""
    dropped: Mapping[str, str]
    """Reason by group that left without being trained."""
    forgotten_drops: int = 0
    """Dropped groups that the ledger no longer names: it keeps about the last 100,000."""
    cursor: Cursor
    """Next prompt to admit: every position before it has been admitted."""
    replays: tuple[str, ...] = ()
    """Groups that replay a dead letter, the oldest letter first: admitted without a position. Those of letters that
    were deleted are known to nobody."""
    epoch_size: int | None = None
    """Prompts per epoch; None infers it from the largest index seen once an epoch is over."""
    policies: tuple[PolicyRecord, ...] = ()
    """The registry: knows the train step of versions whose checkpoint is pruned."""


@dataclass(slots=True, kw_only=True)
class Trained:
    """Counts over the batch files, filled batch by batch."""

    steps_of_group: dict[str, list[int]] = field(default_factory=dict)
    first_place: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Group and train step in which a trajectory was found first."""
    trajectories_twice: dict[str, list[str]] = field(default_factory=dict)
    """Groups of the trajectories that were found in another group too, or again in the same one."""
    groups: int = 0
    trajectories: int = 0
    loss_tokens: int = 0
    off_policy_tokens: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    """Trajectories by staleness."""
    violations: list[str] = field(default_factory=list)
    unknown: int = 0
    """Trajectories with tokens of a version whose train step nothing names."""
    versions: set[int] = field(default_factory=set)
    pure_segments: dict[int, Counter[int]] = field(default_factory=dict)
    """Pure segments by version and train step of the batch that holds them."""
    pure_tokens: Counter[int] = field(default_factory=Counter)
    """Their tokens, by version."""
    impure_segments: int = 0
    impure_tokens: int = 0
    cursor: Cursor = field(default_factory=Cursor)
    """The furthest prompt cursor that a batch file has noted."""

    def trained_twice(self) -> dict[str, tuple[int, ...]]:
        """Groups in more than one batch file."""
        return {group_id: tuple(steps) for group_id, steps in self.steps_of_group.items() if len(steps) > 1}

    @property
    def policy_tokens(self) -> int:
        """Tokens that a policy wrote."""
        return self.pure_tokens.total() + self.impure_tokens

    def note_ids(self, batch: Batch) -> None:
        """Note where the groups and trajectories of a batch file are."""
        for group in batch.groups:
            self.steps_of_group.setdefault(group.group_id, []).append(batch.train_step)
            for trajectory in group.trajectories:
                place = (group.group_id, batch.train_step)
                first = self.first_place.setdefault(trajectory.trajectory_id, place)
                # The same group at another step is a group that was trained twice, and is counted as that.
                if first is not place and (first[0] != group.group_id or first == place):
                    self.trajectories_twice.setdefault(trajectory.trajectory_id, [first[0]]).append(group.group_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessRule:
    """The run's bound."""

    max_staleness: int | None
    mask_old_segments: bool
    """Older tokens are out of the loss, so they do not count."""


def read_batches(
    store: CheckpointStore,
    committed: int,
    rule: StalenessRule,
    train_steps: Mapping[int, int],
    advance: Callable[[], None],
) -> tuple[Trained, dict[int, str]]:
    """Count over the batch files of steps 1 to ``committed``; returns (counts, reason by step without a sound file).

    Later files are of steps that are not committed yet: they are read as a whole and count for where a group or a
    trajectory is, and for nothing else. ``train_steps`` names the train step of every known policy version; ``advance``
    is called after each file up to ``committed``.
    """
    trained = Trained()
    damaged: dict[int, str] = {}
    later = [step for step in store.batch_steps() if step > committed]
    for step in (*range(1, committed + 1), *later):
        try:
            batch = store.read_batch(step)
            _note_cursor(trained, store.batch_footer(step).cursor)
        except CheckpointError as error:
            damaged[step] = str(error)
        else:
            trained.note_ids(batch)
            if step <= committed:
                count_batch(trained, batch, rule, train_steps)
        if step <= committed:
            advance()
    return trained, damaged


def count_batch(trained: Trained, batch: Batch, rule: StalenessRule, train_steps: Mapping[int, int]) -> None:
    """Add one batch to the counts."""
    for group in batch.groups:
        trained.groups += 1
        for trajectory in group.trajectories:
            trained.trajectories += 1
            _count_segments(trained, trajectory, batch.train_step)
            if trajectory.outcome is not None:
                _count_loss(trained, trajectory, batch.train_step - 1, rule, train_steps)


def _note_cursor(trained: Trained, cursor: Cursor) -> None:
    trained.cursor = max(trained.cursor, cursor, key=lambda c: (c.epoch, c.index))


def _count_segments(trained: Trained, trajectory: Trajectory, train_step: int) -> None:
    for segment in policy_segments(trajectory):
        if segment.pure:
            trained.pure_segments.setdefault(segment.policy_version, Counter())[train_step] += 1
            trained.pure_tokens[segment.policy_version] += len(segment)
        else:
            trained.impure_segments += 1
            trained.impure_tokens += len(segment)


def _count_loss(
    trained: Trained, trajectory: Trajectory, current: int, rule: StalenessRule, train_steps: Mapping[int, int]
) -> None:
    """Staleness and off-policy tokens of one trajectory that has a reward; ``current`` is the step before its batch."""
    segments = [s for s in policy_segments(trajectory) if len(s)]
    trained.versions.update(s.policy_version for s in segments)
    if any(s.policy_version not in train_steps for s in segments):
        trained.unknown += 1
        return
    ages = [(current - train_steps[s.policy_version], len(s)) for s in segments]
    if rule.mask_old_segments and rule.max_staleness is not None:
        ages = [(age, tokens) for age, tokens in ages if age <= rule.max_staleness]
    if not ages:
        return
    trained.loss_tokens += sum(tokens for _, tokens in ages)
    trained.off_policy_tokens += sum(tokens for age, tokens in ages if age > 0)
    worst = max(age for age, _ in ages)
    trained.staleness[worst] += 1
    if rule.max_staleness is not None and worst > rule.max_staleness:
        trained.violations.append(trajectory.trajectory_id)


def policy_segments(trajectory: Trajectory) -> list[Segment]:
    """Segments that a policy wrote, in order."""
    return [s for s in trajectory.segments if s.source is SegmentSource.POLICY]


def lost_groups(account: QueueAccount, in_batch_files: Collection[str]) -> tuple[str, ...]:
    """Admitted groups that are nowhere and left no reason: by prompt position, then replays of dead letters.

    As many of them as the ledger has let go are taken for those, the oldest first: what it no longer names was dropped
    long ago. More than that are lost.
    """
    known = {*in_batch_files, *account.live, *account.dropped}
    nowhere = tuple(group_id for group_id in admitted_groups(account, known) if group_id not in known)
    return nowhere[account.forgotten_drops :]


def admitted_groups(account: QueueAccount, known: Collection[str]) -> Iterable[str]:
    """Ids of every prompt position before the cursor, then those of replayed dead letters."""
    size = account.epoch_size
    if size is None and account.cursor.epoch > 0:
        indices = [int(match[2]) for group_id in known if (match := _GROUP_ID.match(group_id))]
        size = int(np.max(indices, initial=-1)) + 1
    for epoch in range(account.cursor.epoch):
        yield from (f"e{epoch}-{index}" for index in range(size or 0))
    yield from (f"e{account.cursor.epoch}-{index}" for index in range(account.cursor.index))
    yield from account.replays


def train_steps_of_versions(policies: Iterable[PolicyRecord], logged: Iterable[tuple[float, float]]) -> dict[int, int]:
    """Train step of every version that any source names; checkpoint manifests win over logs.

    ``logged`` are (policy_version, train_step) pairs, NaN where a log lacks one.
    """
    known = {int(version): int(step) for version, step in logged if version == version and step == step}
    known.setdefault(0, 0)
    return known | {record.policy_version: record.train_step for record in policies}
