"""Facts of one train step of a simulated run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rollmesh.sim.queue_model import ModelGroup
from rollmesh.types import TrajectoryState


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRecord:
    """One train step."""

    train_step: int
    cut_at: float
    """Virtual seconds, as all times."""
    trained_at: float
    trainer_wait_seconds: float
    """Time for which the trainer had no batch before this one."""
    trajectories: int
    tokens_by_staleness: Mapping[int, int]
    """Tokens in the loss by the train steps between their policy and the trainer."""
    masked_tokens: int
    """Tokens of scored trajectories that are too old for the loss."""
    trajectories_by_staleness: Mapping[int, int]
    """By the staleness of the oldest token in the loss, if there is one."""
    version_spans: int
    """Sum over the trajectories of newest minus oldest policy version."""

    @property
    def tokens(self) -> int:
        """Tokens trained on."""
        return sum(self.tokens_by_staleness.values())


def update_record(
    train_step: int,
    groups: Iterable[ModelGroup],
    version_steps: Sequence[int],
    *,
    cut_at: float,
    trained_at: float,
    trainer_wait_seconds: float,
    masked_from: int | None = None,
) -> UpdateRecord:
    """Count the tokens of a claimed batch; its members must not be deleted yet.

    Tokens of a staleness from ``masked_from`` on are out of the loss; None masks none.
    """
    tokens: Counter[int] = Counter()
    oldest: Counter[int] = Counter()
    trajectories = spans = masked = 0
    for group in groups:
        for member in group.members:
            if member.state is not TrajectoryState.SCORED:
                continue
            trajectories += 1
            saves = member.kept_saves
            in_loss = []
            for save in saves:
                age = train_step - 1 - version_steps[save.policy_version]
                if masked_from is not None and age >= masked_from:
                    masked += save.token_count
                else:
                    tokens[age] += save.token_count
                    in_loss.append(age)
            if in_loss:
                oldest[in_loss[0]] += 1
            spans += saves[-1].policy_version - saves[0].policy_version
    return UpdateRecord(
        train_step=train_step,
        cut_at=cut_at,
        trained_at=trained_at,
        trainer_wait_seconds=trainer_wait_seconds,
        trajectories=trajectories,
        tokens_by_staleness=dict(sorted(tokens.items())),
        masked_tokens=masked,
        trajectories_by_staleness=dict(sorted(oldest.items())),
        version_spans=spans,
    )
