"""Client of RewardService."""

from __future__ import annotations

from collections.abc import Sequence

import grpc.aio

from rollmesh.config import RunConfig
from rollmesh.errors import RewardUnavailable
from rollmesh.runtime.endpoints import Addresses, service_addresses
from rollmesh.runtime.health import Waits
from rollmesh.runtime.port_security import OPEN, PortSecurity
from rollmesh.types import RewardOutcome, Trajectory
from rollmesh.v1 import reward_service_pb2 as pb
from rollmesh.v1 import reward_service_pb2_grpc as stubs
from rollmesh.wire.codec import outcome_from_pb
from rollmesh.wire.reward_messages import score_item_to_pb
from rollmesh.wire.scoring_client import OpenCall, ScoringClient


class RewardClient(ScoringClient[pb.ScoreItem, RewardOutcome]):
    """Client of the reward services of a run."""

    unavailable = timed_out = RewardUnavailable

    def __init__(
        self,
        config: RunConfig,
        *,
        addresses: Addresses | None = None,
        security: PortSecurity = OPEN,
        deadline_seconds: float = 300.0,
        waits: Waits | None = None,
    ) -> None:
        """``addresses`` returns the host:port of the services; the default uses the run file."""
        addresses = addresses or service_addresses(config, "reward", config.reward.address, "reward")
        super().__init__("reward", addresses, security, deadline_seconds, waits)

    async def score(self, trajectories: Sequence[Trajectory]) -> list[RewardOutcome]:
        """Score finished trajectories; returns one outcome per trajectory, in order.

        Raises RewardUnavailable if no service answers before the deadline.
        """
        return await self._score([(score_item_to_pb(t), t.traceparent) for t in trajectories])

    def _open(self, channel: grpc.aio.Channel) -> OpenCall[pb.ScoreItem]:
        stub = stubs.RewardServiceStub(channel)  # type: ignore[no-untyped-call]
        return lambda items, timeout, metadata: stub.Score(
            pb.ScoreRequest(items=items), timeout=timeout, metadata=metadata
        )

    def _result(self, response: pb.ScoreResponse) -> RewardOutcome:
        return outcome_from_pb(response.outcome)
