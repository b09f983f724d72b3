"""Rollback to an older policy: its weights, zero optimizer moments, no work of the abandoned branch.

    wait for the publication in flight           it is of the branch that is abandoned
    load the weights of the requested version, moments zero
    state -> COMMITTED, rollback_count + 1       a restart from here continues after the rollback
    publish -> announce                          the next version number, parent = the requested version
    drop unclaimed work (rolled_back)            any of it may contain tokens of the abandoned branch; the leader cuts
                                                 no batch until all of it is dropped
    finish the request

The train step continues, and trained batches stay in the ledger. Every line may be repeated after a kill.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from rollmesh.errors import CheckpointError, TrainingDiverged
from rollmesh.runtime.logging import Logger, get_logger
from rollmesh.store import RollbackRequest
from rollmesh.trainer.service.leading_rank import LeadingRank
from rollmesh.trainer.service.publishing import Publisher

T = TypeVar("T")


@dataclass(eq=False)
class RollbackRunner:
    """Runner of rollback requests, between two train steps."""

    _rank: LeadingRank
    _publisher: Publisher
    _log: Logger = field(default_factory=lambda: get_logger("rollback"), init=False)

    async def carry_out(self, commit: Callable[[], Awaitable[None]]) -> None:
        """Carry out the pending request once all batch files are replayed; after an error the next start does."""
        request = await self.pending()
        if request is None:
            return
        steps = await self._rank.retried("list_batch_files", self._rank.checkpoints.batch_steps)
        if steps and steps[-1] > self._rank.ranks.trainer.train_step:
            return
        await self.unless_abandoned(self._publisher.announced())
        refusal, progress, version = None, self._rank.progress, request.policy_version
        session, store, token = self._rank.session, self._rank.session.store, self._rank.session.token
        if request.request_id != progress.rollback_id:
            self._rank.ranks.catalog.update(await session.retry("policies", store.policies.announced))
            refusal = await self._rank.retry.run("take_weights", lambda: self._take_weights(version))
            if refusal is None:
                progress.rollback_count += 1
                progress.rollback_id = request.request_id
                progress.rollback_step = self._rank.ranks.trainer.train_step
                progress.rolled_back_to = version
                progress.nonfinite_updates_in_a_row = 0
                await commit()
        if refusal is None:
            new = await self._publisher.publish(self._rank.ranks.trainer.train_step)
            dropped = await session.retry("rollback", lambda: store.training.roll_back(token))
            self._log.info("rolled_back", to_version=version, policy_version=new, dropped_groups=dropped)
        else:
            self._log.error("rollback_refused", policy_version=version, message=str(refusal))
        await session.retry("finish_rollback", lambda: store.rollbacks.finish(token, request))

    async def unless_abandoned(self, publication: Awaitable[T]) -> T | None:
        """Await a call of the publisher; return None for a policy that has diverged and that a request abandons.

        Raises TrainingDiverged without a request. Batch files that were confirmed before the divergence was found are
        replayed first, and nothing is published meanwhile.
        """
        try:
            return await publication
        except TrainingDiverged as error:
            if await self.pending() is None:
                raise
            self._log.warning("diverged_policy_not_published", message=str(error))
            return None

    async def pending(self) -> RollbackRequest | None:
        """Return the request that is not yet carried out; None without one."""
        return await self._rank.session.retry("rollback_request", self._rank.session.store.rollbacks.pending)

    async def _take_weights(self, version: int) -> CheckpointError | None:
        """Load the weights of a version; return the error of one that is not kept, which is no failure of the store."""
        try:
            await self._rank.in_torch(lambda: self._rank.ranks.take_weights(version))
        except CheckpointError as error:
            if error.outside:
                raise
            return error
        return None
