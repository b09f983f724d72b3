"""Log-probabilities of given sequences, for the canary and the audit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rollmesh.generator.engines.torch.adapter_stack import BASE
from rollmesh.generator.engines.torch.decoder_model import DecoderModel
from rollmesh.generator.engines.torch.prefill_admission import prefill_batches
from rollmesh.generator.engines.torch.torch_options import forward_tokens
from rollmesh.types import Float32Array, Int32Array


@torch.inference_mode()
def score_sequences(model: DecoderModel, sequences: Sequence[Int32Array], place: int = BASE) -> list[Float32Array]:
    """Compute the log-probability (T=1) of each token after the first, [tokens - 1] per sequence.

    ``place`` is the place of an adapter.
    """
    results: list[Float32Array] = [np.empty(0, np.float32) for _ in sequences]
    for batch in prefill_batches([len(ids) for ids in sequences], forward_tokens(model.device)):
        width = len(sequences[batch[0]])
        if width < 2:
            continue
        tokens = np.zeros((len(batch), width), np.int64)
        for row, index in enumerate(batch):
            tokens[row, : len(sequences[index])] = sequences[index]
        logprobs = model.score(torch.from_numpy(tokens).to(model.device), place).cpu().numpy()
        for row, index in enumerate(batch):
            results[index] = logprobs[row, : len(sequences[index]) - 1].copy()
    return results
