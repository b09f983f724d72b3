"""Groups that an engine sampled, as a trainer would have trained them."""

from __future__ import annotations

from rollmesh.generator.engines.torch.torch_engine import TorchEngine
from rollmesh.types import (
    Chunk,
    FinishReason,
    Group,
    OutcomeKind,
    Prompt,
    RewardOutcome,
    Segment,
    Trajectory,
)

from ...kit.generation import prompt_ids
from .generator_run import make_call


async def sampled(engine: TorchEngine, number: int) -> list[Chunk]:
    """Return the chunks that the engine streams for one call."""
    call = make_call(f"e0-{number}.0", prompt_ids(number), max_new_token_count=40)
    return [chunk async for chunk in engine.generate(call)]


def group_of(number: int, chunks: list[Chunk]) -> Group:
    """A trained group of one trajectory."""
    segments = tuple(
        Segment(
            token_ids=chunk.token_ids,
            behavior_logprobs=chunk.behavior_logprobs,
            policy_version=chunk.policy_version,
            kv_min_version=chunk.kv_min_version,
        )
        for chunk in chunks
        if len(chunk.token_ids)
    )
    trajectory = Trajectory(
        trajectory_id=f"e0-{number}.0",
        group_id=f"e0-{number}",
        member_index=0,
        prompt=Prompt(prompt_id=f"p{number}", token_ids=prompt_ids(number), verifier="exact"),
        segments=segments,
        finish_reason=FinishReason.LENGTH,
        outcome=RewardOutcome(kind=OutcomeKind.SCORED, value=1.0),
    )
    return Group(group_id=f"e0-{number}", admission_index=number, trajectories=(trajectory,))
