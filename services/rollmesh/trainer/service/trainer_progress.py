"""Progress of the run, which is part of the trainer state, and loading of the newest state."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.committed import CommittedState
from rollmesh.config import RunConfig
from rollmesh.errors import CheckpointError, ConfigError, Reason
from rollmesh.runtime.logging import get_logger
from rollmesh.trainer.service.ranks import RankCoordinator
from rollmesh.trainer.service.trainer_metrics import DECILES
from rollmesh.types import GeneratorRecord, GeneratorWork, PolicyRecord

_NAMES = ("prefill_tokens", "reprefill_tokens", "running_slot_seconds", "slot_seconds")
_MOST_REMEMBERED = 10_000
"""Maximum number of generators whose totals are stored: all current ones, and many that may return."""


@dataclass(slots=True, kw_only=True)
class GeneratedTokens:
    """Tokens that the generators of a run have sampled, from the total that each generator registers."""

    total: int = 0
    """Total since the start of the run."""
    seen: dict[str, int] = field(default_factory=dict)
    """Registered total by instance, the least recently seen first."""

    def add(self, records: Sequence[GeneratorRecord]) -> None:
        """Add the tokens since the last observation of each generator, by this trainer or a previous one."""
        for record in records:
            now = record.work.generated_tokens
            before = self.seen.pop(record.instance_id, 0)
            # A restored Redis may have an older record.
            self.seen[record.instance_id] = max(now, before)
            self.total += max(0, now - before)
        for instance_id in list(self.seen)[:-_MOST_REMEMBERED]:
            del self.seen[instance_id]

    def goodput(self, trained_tokens: int) -> float | None:
        """Return trained tokens per sampled token, 0..1; None while generators are missing in the total."""
        if not self.total or trained_tokens > self.total:
            return None
        return trained_tokens / self.total


@dataclass(slots=True, kw_only=True)
class Progress:
    """Totals of the run and its rollbacks. They are saved with every state, so they match its weights."""

    trained_token_total: int = 0
    """Sum of the tokens in the numerators of all losses."""
    trained_groups_by_length_decile: list[int] = field(default_factory=lambda: [0] * DECILES)
    """Groups trained on, by the length decile of their longest trajectory."""
    rollback_count: int = 0
    """Rollbacks carried out. A state with more rollbacks takes precedence over every state with fewer."""
    rollback_id: str = ""
    """Id of the last request carried out."""
    rolled_back_to: int | None = None
    """Policy version that the last rollback restored."""
    nonfinite_updates_in_a_row: int = 0
    """Updates skipped for a gradient that is not finite, since the last applied update."""
    generated: GeneratedTokens = field(default_factory=GeneratedTokens)
    """Tokens that the generators sampled."""
    rollback_step: int = 0
    """Train step at the last rollback: batches up to it are of an abandoned branch, and no step replays them."""

    def to_extra(self) -> dict[str, Any]:
        """Return JSON values for the trainer state."""
        # Pairs, because the state sorts the keys of objects.
        generated = {"total": self.generated.total, "seen": [list(pair) for pair in self.generated.seen.items()]}
        return {"progress": {**asdict(self), "generated": generated}}

    @classmethod
    def from_extra(cls, extra: Mapping[str, Any]) -> Self:
        """Restore from ``to_extra``; an empty mapping gives the progress of the initial model."""
        if not extra:
            return cls()
        values, generated = extra["progress"], extra["progress"]["generated"]
        restored = GeneratedTokens(total=generated["total"], seen=dict(generated["seen"]))
        return cls(**{**values, "generated": restored})

    def count_updates(self, applied: int, trailing_skipped: int) -> None:
        """Count the updates of one train step."""
        before = 0 if applied else self.nonfinite_updates_in_a_row
        self.nonfinite_updates_in_a_row = before + trailing_skipped

    def label(self, session: str) -> str:
        """Return the session part of folder names; it has the rollback count, as a rollback repeats a train step."""
        return f"{session}r{self.rollback_count}" if self.rollback_count else session

    def published(self, record: PolicyRecord) -> bool:
        """Tell whether a policy was written at the current rollback count."""
        return record.rollback_count == self.rollback_count


def load_newest_state(ranks: RankCoordinator, checkpoints: CheckpointStore, config: RunConfig) -> Progress:
    """Load the newest readable committed state; return a new Progress for the initial model.

    An older state, or the initial model, loses no work if the batch files after it are replayed. Raises CheckpointError
    for a store that cannot be read at the moment, and for damaged states that a replay cannot replace: states after the
    last rollback, or without all batch files. Raises ConfigError for a state of another model or optimizer.
    """
    log = get_logger("training")
    judged = checkpoints.judged_states()
    states, unreadable = judged.sound, dict(judged.unsound)
    rejected: list[str] = []
    if states:
        _check_rollback(checkpoints, states[0], unreadable)
    for state in states:
        if state.record.rollback_count < states[0].record.rollback_count:
            break
        shared = False
        try:
            if ranks.world.size > 1:
                # Damage is found here, where another state may follow: an error of the load below ends all ranks.
                checkpoints.verify_state(state)
                shared = True
            extra = ranks.load(state)
        except CheckpointError as error:
            if error.reason == Reason.FOREIGN_ARCHITECTURE:
                raise ConfigError(
                    f"trainer.optimizer={config.trainer.optimizer}, model.path={config.model.path}: the newest trainer "
                    f"state of this run does not fit them ({error}); set both as they were, or start a new run "
                    "(another name and folder)"
                ) from error
            if error.outside or shared:
                raise
            rejected.append(str(error))
            unreadable[state.folder.name] = str(error)
            log.error("state_refused", folder=state.folder.name, reason=error.reason, message=str(error))
            continue
        log.info("state_loaded", train_step=state.train_step, folder=state.folder.name)
        return Progress.from_extra(extra)
    if rejected and states[0].record.rollback_count > 0:
        raise CheckpointError(f"no trainer state after the last rollback can be read: {'; '.join(rejected)}")
    _check_replay_from_start(checkpoints, unreadable)
    if unreadable:
        log.error("run_replayed_from_start", refused=sorted(unreadable))
    return Progress()


def _check_rollback(checkpoints: CheckpointStore, newest: CommittedState, unreadable: Mapping[str, str]) -> None:
    """Raise CheckpointError if a policy is of a later rollback than the newest state, which was committed before."""
    count = newest.record.rollback_count
    later = [record for record in checkpoints.complete_policies() if record.rollback_count > count]
    if later:
        policy = later[-1]
        damaged = "".join(f"; damaged: {reason}" for reason in unreadable.values())
        raise CheckpointError(
            f"{newest.folder}: the newest trainer state that can be read has {count} rollbacks, but policy version "
            f"{policy.policy_version} ({policy.path}) has {policy.rollback_count}: to continue from this state would "
            f"undo a rollback{damaged}; restore the states from a copy, or export that policy and start a new run from "
            "it (model.path)"
        )


def _check_replay_from_start(checkpoints: CheckpointStore, unreadable: Mapping[str, str]) -> None:
    """Raise CheckpointError unless every trained step can be replayed; ``unreadable`` has errors by folder."""
    # With a wrong secret nothing can be read, and nothing of the run may be changed.
    problem = f"no trainer state can be read ({'; '.join(unreadable.values()) or 'none is there'})"
    remedy = (
        "if checkpoints.secret (or ROLLMESH_CHECKPOINTS__SECRET) has changed or is missing, set it as it was, else "
        "restore the checkpoints from a copy"
    )
    if any(record.rollback_count for record in checkpoints.complete_policies()):
        raise CheckpointError(f"{problem}, and a replay from the initial model would undo a rollback; {remedy}")
    committed = [int(name.partition("-")[0]) for name in unreadable]
    confirmed = [step - 1 for step in checkpoints.batch_steps()]  # the newest file may be half written
    for step in range(1, max([0, *committed, *confirmed]) + 1):
        try:
            checkpoints.batch_footer(step)
        except CheckpointError as error:
            if error.outside:
                raise
            raise CheckpointError(
                f"{problem}, and train step {step} cannot be replayed: {error}; {remedy}", reason=error.reason
            ) from error


@dataclass(eq=False)
class EngineWork:
    """Differences of the registered totals, over generators that start and stop."""

    _generated: GeneratedTokens
    """It receives every observation."""
    _seen: dict[str, GeneratorWork] = field(default_factory=dict, init=False)
    _done: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_NAMES, 0.0), init=False)
    _drafts: Counter[str] = field(default_factory=Counter, init=False)

    def begin(self, records: Sequence[GeneratorRecord]) -> None:
        """Assign all work so far to no step of this trainer. Its tokens still count for the run."""
        self.observe(records)
        self._taken()

    def since_last(self, records: Sequence[GeneratorRecord]) -> dict[str, Any]:
        """Return the work since the last step, and its shares (None without work): ``mesh.engines`` of a report."""
        self.observe(records)
        drafts, work = speculation(self._drafts, records), self._taken()
        return work | {
            "speculation": drafts,
            "reprefill_share": _share(work["reprefill_tokens"], work["prefill_tokens"]),
            "bubble_ratio": _share(work["slot_seconds"] - work["running_slot_seconds"], work["slot_seconds"]),
        }

    def observe(self, records: Sequence[GeneratorRecord]) -> None:
        """Add the work of the generators to the current step."""
        self._generated.add(records)
        for record in records:
            before = self._seen.pop(record.instance_id, GeneratorWork())
            for name in _NAMES:
                self._done[name] += getattr(record.work, name) - getattr(before, name)
            self._drafts.update(record.work.speculation)
            self._drafts.subtract(before.speculation)
            self._seen[record.instance_id] = record.work
        # A generator may be missing for a while (Redis unreachable). Its earlier work must not count twice.
        for instance_id in list(self._seen)[:-_MOST_REMEMBERED]:
            del self._seen[instance_id]

    def _taken(self) -> dict[str, float]:
        done, self._done = self._done, dict.fromkeys(_NAMES, 0.0)
        self._drafts.clear()
        return {name: round(value, 3) for name, value in done.items()}


def speculation(done: Mapping[str, int], records: Sequence[GeneratorRecord]) -> dict[str, Any] | None:
    """Return what drafts did, ``mesh.engines.speculation`` of a report; None without speculation.

    An accepted token saves its call a decode step. ``tokens_per_step`` is of one call, by running calls.
    """
    if not done:
        return None
    steps = {name.removeprefix("steps "): count for name, count in done.items() if name.startswith("steps ") and count}
    return {
        "drafted_tokens": done["drafted"],
        "accepted_tokens": done["accepted"],
        "wasted_tokens": done["drafted"] - done["accepted"],
        "draft_bytes": sum(record.draft_bytes for record in records),
        "tokens_per_step": {
            running: round(done[f"tokens {running}"] / count, 3)
            for running, count in sorted(steps.items(), key=lambda item: int(item[0].partition("-")[0]))
        },
    }


def _share(part: float, whole: float) -> float | None:
    return max(0.0, part / whole) if whole > 0 else None
