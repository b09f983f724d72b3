"""Calls, groups and trajectories that several benches make."""

from collections.abc import Iterable, Sequence

import numpy as np

from rollmesh.types import (
    FinishReason,
    GenerationCall,
    Group,
    Int32Array,
    OutcomeKind,
    Prompt,
    RewardOutcome,
    SamplingParams,
    Segment,
    Trajectory,
)


def random_ids(rng: np.random.Generator, vocab_size: int, *shape: int) -> Int32Array:
    """Return uniform token ids of this shape."""
    return rng.integers(0, vocab_size, shape).astype(np.int32)


def make_call(
    name: str, context: Int32Array, new_tokens: int, *, chunk_tokens: int, prompt_tokens: int | None = None
) -> GenerationCall:
    """Return a call without stop ids at temperature 1; the whole context is the prompt, unless its length is given."""
    return GenerationCall(
        trajectory_id=name,
        context_ids=context,
        prompt_token_count=len(context) if prompt_tokens is None else prompt_tokens,
        max_new_token_count=new_tokens,
        sampling=SamplingParams(),
        chunk_token_count=chunk_tokens,
    )


def scored(
    prompt: Prompt,
    group_id: str,
    member: int,
    segments: tuple[Segment, ...],
    reward: float,
    finish_reason: FinishReason | None = FinishReason.STOP,
) -> Trajectory:
    """Return a trajectory with its reward."""
    return Trajectory(
        trajectory_id=f"{group_id}.{member}",
        group_id=group_id,
        member_index=member,
        prompt=prompt,
        segments=segments,
        finish_reason=finish_reason,
        outcome=RewardOutcome(kind=OutcomeKind.SCORED, value=reward),
        shaped_reward=reward,
    )


def group_of(index: int, trajectories: Iterable[Trajectory]) -> Group:
    """Return the group with this admission index."""
    members = tuple(trajectories)
    return Group(group_id=members[0].group_id, admission_index=index, trajectories=members)


def group_of_answers(
    rng: np.random.Generator, index: int, prompt_ids: Int32Array, answers: Sequence[Int32Array], vocab_size: int
) -> Group:
    """Return a group of these answers by version 0, with uniform log-probabilities and random rewards of 0 or 1."""
    prompt = Prompt(prompt_id=str(index), token_ids=prompt_ids, verifier="exact")

    def member(number: int, ids: Int32Array) -> Trajectory:
        logprobs = np.full(len(ids), -np.log(vocab_size), np.float32)
        segment = Segment(token_ids=ids, behavior_logprobs=logprobs, policy_version=0, kv_min_version=0)
        return scored(prompt, f"g{index}", number, (segment,), float(rng.integers(0, 2)))

    return group_of(index, (member(number, ids) for number, ids in enumerate(answers)))
