"""Policy versions and the budgets that follow from them, as this process has read them."""

import asyncio
from dataclasses import dataclass

from rollmesh.curriculum.budgets import Budget
from rollmesh.errors import Conflict, StoreUnavailable
from rollmesh.runtime.logging import note_policy_version
from rollmesh.store.policy_registry import PolicyRegistry
from rollmesh.types import Trajectory

_PAUSE_SECONDS = 0.5


class NewestPolicy:
    """Newest announced version seen by this process; a generator may serve a newer one before this process reads it."""

    def __init__(self, registry: PolicyRegistry) -> None:
        self._registry = registry
        self.newest = -1
        """Newest version read so far; -1 before the first."""

    async def refresh(self) -> None:
        """Read the newest version from the store."""
        latest = await self._registry.latest()
        if latest is not None:
            self.newest = max(self.newest, latest.policy_version)
            note_policy_version(self.newest)

    async def newest_at_least(self, version: int) -> int:
        """Return the newest version; if ``version`` is newer than the cached one, read the store first.

        Retries until the store answers.
        """
        while version > self.newest:
            try:
                await self.refresh()
                break
            except StoreUnavailable:
                await asyncio.sleep(_PAUSE_SECONDS)
        return self.newest


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
