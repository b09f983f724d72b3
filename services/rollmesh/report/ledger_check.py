"""Ledger check of an audit: counts over batch files and committed trainer states, and every replay draw repeated.

Nothing here reads Redis: the caller passes the groups of the queue as a ``QueueAccount``, without which lost groups
are not checked.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from rollmesh.checkpoints.batches import BatchFooter, ReplayDraw, StoredBatch
from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.config.old_logprob_methods import MOST_BATCHES, ReplayConfig, replayed_count
from rollmesh.curriculum.replay import ReplayCandidate, draw_replay, replay_candidates
from rollmesh.errors import CheckpointError
from rollmesh.mesh import Cursor
from rollmesh.types import Batch, PolicyRecord, Segment, SegmentSource, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueAccount:
    """Groups of the trajectory queue, read for the check for lost groups."""

    live: Collection[str]
    """Groups that are open, ready or cut."""
    dropped: Mapping[str, str]
    """Reason by group that was dropped without being trained."""
    forgotten_drops: int = 0
    """Dropped groups that the ledger no longer lists: it keeps about the last 100,000."""
    cursor: Cursor
    """Next prompt to admit: every position before it has been admitted."""
    replays: tuple[str, ...] = ()
    """Groups that replay a dead letter, oldest dead letter first; they are admitted without a position.

    Replays of deleted dead letters are not included.
    """
    epoch_size: int = 0
    """Prompts per epoch, as the run recorded them."""
    policies: tuple[PolicyRecord, ...] = ()
    """Registry entries, with the train step also of versions whose checkpoint is pruned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRule:
    """Settings of a run that its draws depend on; ``replay`` None if the run replays no groups."""

    replay: ReplayConfig | None
    seed: int
    max_staleness: int

    def differences(self, draw: ReplayDraw | None) -> dict[str, tuple[object, object]]:
        """Return (recorded value, value of the run) by setting that differs."""
        if draw is None or self.replay is None:
            return {} if draw is None and self.replay is None else {"replay": (draw is not None, draw is None)}
        ours: Mapping[str, object] = self.replay.model_dump() | {
            "seed": self.seed,
            "max_staleness": self.max_staleness,
        }
        return {name: (getattr(draw, name), value) for name, value in ours.items() if getattr(draw, name) != value}


@dataclass(slots=True, kw_only=True)
class Replays:
    """Replayed groups over the batch files, read in order. They are no second training of their own batch."""

    rule: ReplayRule | None = None
    """Settings of the run; without them, draws are compared with the settings in their own file only."""
    groups: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    """Number of replayed groups by the staleness of their oldest token."""
    problems: list[str] = field(default_factory=list)
    _start: int = 1
    """First train step after the last rollback that a draw has recorded."""
    _digests: dict[int, str] = field(default_factory=dict)
    _candidates: dict[int, list[ReplayCandidate]] = field(default_factory=dict)

    def add(self, stored: StoredBatch, *, counted: bool) -> None:
        """Check the draw of a batch file; ``counted`` if its step is committed."""
        step, draw = stored.batch.train_step, stored.footer.replay
        if counted and self.rule is not None:
            for name, (recorded, ours) in self.rule.differences(draw).items():
                self.problems.append(f"train step {step} records replay with {name}={recorded}; the run has {ours}")
        if draw is not None and counted:
            self.problems += self._differences(stored.footer, draw)
            self.groups += len(draw.groups)
            drawn = set(draw.groups)
            for source in draw.sources:
                chosen = (c for c in self._candidates.get(source, ()) if (source, c.group_id) in drawn)
                for staleness in (step - 1 - candidate.oldest for candidate in chosen):
                    self.staleness[staleness] += 1
                    if self.rule is not None and staleness > self.rule.max_staleness:
                        self.problems.append(
                            f"train step {step} replayed a group of batch {source} with staleness {staleness}; "
                            f"max_staleness={self.rule.max_staleness}"
                        )
        self._digests[step] = stored.footer.payload_sha256
        self._candidates[step] = replay_candidates(stored.batch, stored.footer.version_train_steps)
        for old in [known for known in self._candidates if known <= step - MOST_BATCHES]:
            del self._candidates[old], self._digests[old]

    def _differences(self, footer: BatchFooter, draw: ReplayDraw) -> Iterator[str]:
        step = footer.train_step
        outside = [source for source in draw.sources if not step - draw.batches <= source < step]
        if outside:
            yield f"train step {step} drew from batch {outside[0]}, which is none of the {draw.batches} before it"
        window = min(draw.batches, draw.max_staleness)
        for missed in range(max(draw.first, step - window), step):
            if missed in self._digests and missed not in draw.sources:
                yield f"train step {step} did not draw from batch {missed}, which has a valid file"
        if draw.first == step:  # the first step, or the first after a rollback
            self._start = step
        if draw.first != max(step - window, self._start):
            yield f"train step {step} drew from batch {draw.first} on instead of {max(step - window, self._start)}"
        for source, digest in draw.sources.items():
            if source not in self._digests:
                yield f"train step {step} drew from batch {source}, which has no valid file"
            elif self._digests[source] != digest:
                yield f"train step {step} drew from batch {source}, whose file has other trajectories now"
        again = draw_replay(
            [candidate for source in draw.sources for candidate in self._candidates.get(source, ())],
            replayed_count(len(footer.group_ids), draw.share),
            by=draw.by,
            seed=draw.seed,
            train_step=step,
            max_staleness=draw.max_staleness,
        )
        if [(c.train_step, c.group_id) for c in again] != draw.groups:
            yield f"train step {step} replayed {len(draw.groups)} groups, which are not those that its seed draws"


@dataclass(slots=True, kw_only=True)
class Trained:
    """Counts over the batch files, updated batch by batch."""

    steps_of_group: dict[str, list[int]] = field(default_factory=dict)
    first_location: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Group and train step of the first occurrence of each trajectory."""
    trajectories_twice: dict[str, list[str]] = field(default_factory=dict)
    """Groups of the trajectories that occur in several groups, or several times in one group."""
    groups: int = 0
    trajectories: int = 0
    loss_tokens: int = 0
    off_policy_tokens: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    """Number of trajectories by staleness."""
    violations: list[str] = field(default_factory=list)
    unknown: int = 0
    """Trajectories with tokens of a version with unknown train step."""
    versions: set[int] = field(default_factory=set)
    pure_segments: dict[int, Counter[int]] = field(default_factory=dict)
    """Number of pure segments by version and train step of their batch."""
    pure_tokens: Counter[int] = field(default_factory=Counter)
    """Tokens of the pure segments by version."""
    impure_segments: int = 0
    impure_tokens: int = 0
    cursor: Cursor = field(default_factory=Cursor)
    """Largest prompt cursor in the batch files."""
    replays: Replays = field(default_factory=Replays)

    def trained_twice(self) -> dict[str, tuple[int, ...]]:
        """Return the groups in more than one batch file, with their train steps."""
        return {group_id: tuple(steps) for group_id, steps in self.steps_of_group.items() if len(steps) > 1}

    @property
    def policy_tokens(self) -> int:
        """Number of sampled tokens."""
        return self.pure_tokens.total() + self.impure_tokens

    def add_locations(self, batch: Batch) -> None:
        """Record the locations of the groups and trajectories of a batch file."""
        for group in batch.groups:
            self.steps_of_group.setdefault(group.group_id, []).append(batch.train_step)
            for trajectory in group.trajectories:
                location = (group.group_id, batch.train_step)
                first = self.first_location.setdefault(trajectory.trajectory_id, location)
                # The same group at another step counts as a group trained twice.
                if first is not location and (first[0] != group.group_id or first == location):
                    self.trajectories_twice.setdefault(trajectory.trajectory_id, [first[0]]).append(group.group_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessRule:
    """Staleness bound of a run."""

    max_staleness: int | None
    mask_old_segments: bool
    """True if older tokens are masked in the loss; they do not count then."""


def read_batches(
    store: CheckpointStore,
    committed: int,
    rule: StalenessRule,
    train_steps: Mapping[int, int],
    advance: Callable[[], None],
    replay_rule: ReplayRule | None = None,
    count: Callable[[Batch], None] = lambda _: None,
) -> tuple[Trained, dict[int, str]]:
    """Count over the batch files of steps 1 to ``committed``; return (counts, reason by step without a valid file).

    Later files belong to steps that are not committed yet: they are read completely, but only the locations of their
    groups and trajectories count. ``train_steps`` contains the train step of every known policy version. ``advance`` is
    called after each file up to ``committed``, ``count`` with its batch. Draws are compared with the settings of
    ``replay_rule``.
    """
    trained = Trained(replays=Replays(rule=replay_rule))
    damaged: dict[int, str] = {}
    later = [step for step in store.batch_steps() if step > committed]
    for step in (*range(1, committed + 1), *later):
        try:
            stored = store.stored_batch(step)
        except CheckpointError as error:
            damaged[step] = str(error)
        else:
            trained.cursor = max(trained.cursor, stored.footer.cursor, key=lambda c: (c.epoch, c.index))
            trained.add_locations(stored.batch)
            trained.replays.add(stored, counted=step <= committed)
            if step <= committed:
                count_batch(trained, stored.batch, rule, train_steps)
                count(stored.batch)
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
    """Count staleness and off-policy tokens of a trajectory with a reward; ``current`` is the step before its batch."""
    # docs/architecture.md: The staleness bound
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
    """Return the segments with sampled tokens, in order."""
    return [s for s in trajectory.segments if s.source is SegmentSource.POLICY]


def lost_groups(account: QueueAccount, in_batch_files: Collection[str]) -> tuple[str, ...]:
    """Find the admitted groups that are in no batch file, not in the queue and not in the ledger of drops.

    Groups are sorted by prompt position, followed by replays of dead letters. The ledger has removed the entries of
    ``forgotten_drops`` groups, dropped long ago; as many of the oldest missing groups are skipped. The others are lost.
    """
    known = {*in_batch_files, *account.live, *account.dropped}
    missing = tuple(group_id for group_id in admitted_groups(account) if group_id not in known)
    return missing[account.forgotten_drops :]


def admitted_groups(account: QueueAccount) -> Iterable[str]:
    """Yield the group ids of every prompt position before the cursor, then those of replayed dead letters."""
    for epoch in range(account.cursor.epoch):
        yield from (f"e{epoch}-{index}" for index in range(account.epoch_size))
    yield from (f"e{account.cursor.epoch}-{index}" for index in range(account.cursor.index))
    yield from account.replays


def train_steps_of_versions(policies: Iterable[PolicyRecord], logged: Iterable[tuple[float, float]]) -> dict[int, int]:
    """Merge the train steps of all known versions; checkpoint manifests take precedence over logs.

    ``logged`` are (policy_version, train_step) pairs, NaN for missing values.
    """
    known = {int(version): int(step) for version, step in logged if version == version and step == step}
    known.setdefault(0, 0)
    return known | {record.policy_version: record.train_step for record in policies}
