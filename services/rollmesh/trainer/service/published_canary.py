"""The canary of a published policy: fixed sequences with the trainer's log-probabilities, for its readers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollmesh.checkpoints.manifest import CanarySequence
from rollmesh.errors import ConfigError, TrainingDiverged
from rollmesh.types import Float32Array, Int32Array

CANARY_SEQUENCES = 8
CANARY_TOKENS = 32
_FEW_SEQUENCES = 2
_LARGE_PARAMETERS = 100_000_000
_SEED = 20_071_115


def canary_count(parameter_count: int, device_type: str) -> int:
    """Return the number of canary sequences for a model that is trained on a device of this type.

    A large model takes seconds of a CPU core to score them all, in the trainer and in every generator.
    """
    return _FEW_SEQUENCES if device_type == "cpu" and parameter_count >= _LARGE_PARAMETERS else CANARY_SEQUENCES


def canary_sequences(vocab_size: int, count: int = CANARY_SEQUENCES) -> list[Int32Array]:
    """Return the first canary sequences, which are fixed for a vocabulary size, int32 [tokens] each."""
    noise = np.random.default_rng(_SEED)
    return [noise.integers(0, vocab_size, CANARY_TOKENS).astype(np.int32) for _ in range(count)]


def scored_canary(
    train_step: int, sequences: Sequence[Int32Array], logprobs: Sequence[Float32Array]
) -> list[CanarySequence]:
    """Return the sequences with their scores under the policy of a train step.

    Raises TrainingDiverged if a score is not finite, and ConfigError for one of the initial model.
    """
    if not all(np.isfinite(values).all() for values in logprobs):
        if train_step == 0:
            raise ConfigError(
                "model.path: the log-probabilities of the initial model are not finite although its weights are; it "
                "cannot be trained: use another checkpoint, or the dtype that it was made for (model.dtype)"
            )
        raise TrainingDiverged(
            f"train step {train_step}: the log-probabilities of the policy are not finite, so no generator can serve "
            "it. Start a new run from an older policy (model.path) with a lower trainer.learning_rate"
        )
    return [
        CanarySequence(token_ids=ids.tolist(), logprobs=values.tolist())
        for ids, values in zip(sequences, logprobs, strict=True)
    ]
