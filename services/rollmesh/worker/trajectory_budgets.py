"""Budget of each trajectory: that of the policy under which it was first leased, whichever worker continues it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from rollmesh.curriculum.budget_protocol import Budget
from rollmesh.errors import Conflict, StoreUnavailable
from rollmesh.store.policy_registry import PolicyRegistry
from rollmesh.types import Trajectory

_PAUSE_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryBudget:
    """Budget of one trajectory."""

    tokens: int
    turns: int | None = None
    """None for the turns of the program."""


class TrajectoryBudgets:
    """Budgets by the version under which a trajectory was first leased; its train step is read once per version."""

    def __init__(
        self, registry: PolicyRegistry, most_tokens: int, tokens: Budget | None = None, turns: Budget | None = None
    ) -> None:
        """Set the rules of a run; ``most_tokens`` is the budget without a rule for tokens."""
        self._registry = registry
        self._most_tokens = most_tokens
        self._tokens = tokens
        self._turns = turns
        self._train_steps: dict[int, int] = {}

    async def of(self, trajectory: Trajectory) -> TrajectoryBudget:
        """Return the budget of a trajectory; retries until the store answers.

        Raises Conflict if the policy of its first lease was never announced.
        """
        if self._tokens is None and self._turns is None:
            return TrajectoryBudget(tokens=self._most_tokens)
        step = await self._train_step(trajectory.birth_version)
        return TrajectoryBudget(
            tokens=self._most_tokens if self._tokens is None else self._tokens(step),
            turns=None if self._turns is None else self._turns(step),
        )

    async def _train_step(self, version: int) -> int:
        # A version number is never used again, so its train step never changes.
        while version not in self._train_steps:
            try:
                policy = await self._registry.get(version)
            except StoreUnavailable:
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            # Trajectories may be leased before the initial policy is announced.
            if policy is None and version > 0:
                raise Conflict(
                    f"policy version {version} was never announced, so the budget of its train step is unknown"
                )
            self._train_steps[version] = 0 if policy is None else policy.train_step
        return self._train_steps[version]
