"""Tokenizers of bytes, and trajectories of one answer."""

import numpy as np
import tokenizers

from rollmesh.types import FinishReason, Int32Array, Prompt, Segment, Trajectory


def byte_tokenizer() -> tokenizers.Tokenizer:
    """A tokenizer with one token per byte, which tests may add tokens to."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    return made


def written(ids: Int32Array, version: int = 0) -> Segment:
    """Tokens that a policy wrote."""
    logprobs = np.full(len(ids), -1.0, np.float32)
    return Segment(token_ids=ids, behavior_logprobs=logprobs, policy_version=version, kv_min_version=version)


def answer(prompt: Prompt, *segments: Segment) -> Trajectory:
    """A finished trajectory, the only one of its group."""
    return Trajectory(
        trajectory_id="g.0",
        group_id="g",
        member_index=0,
        prompt=prompt,
        segments=segments,
        finish_reason=FinishReason.STOP,
    )
