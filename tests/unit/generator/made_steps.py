"""A model and a cache without an engine around them, for tests of single decode steps; and drafts at all times."""

from pathlib import Path

import numpy as np
import torch

from rollmesh.generator.engines.torch.architecture import read_architecture
from rollmesh.generator.engines.torch.decode_step import Capture, Stepper
from rollmesh.generator.engines.torch.decoder_model import DecoderModel
from rollmesh.generator.engines.torch.kv_cache import KvCache
from rollmesh.generator.engines.torch.speculation import Gate
from rollmesh.generator.engines.torch.weights import load_weights

from ...kit.generation import VOCAB

CPU = torch.device("cpu")
SLOTS = 8


class StepBench:
    """A model and a cache with random contents, to run steppers over."""

    def __init__(self, folder: Path, *, context: int = 96, device: torch.device = CPU) -> None:
        self.arch = read_architecture(folder)
        weights = load_weights(folder, self.arch, torch.float32, device)
        self.model = DecoderModel(self.arch, weights, context, device, swap_in_place=True)
        self.cache = KvCache(
            self.arch,
            token_capacity=SLOTS * context,
            widths=(32, context),
            dtype=torch.float32,
            device=device,
        )

    def fill(self, lengths: list[int]) -> np.ndarray:
        """Give slot i ``lengths[i]`` random tokens; returns the lengths in the order of the rows."""
        arch, noise = self.arch, torch.Generator().manual_seed(1)
        for slot, count in enumerate(lengths):
            self.cache.add(slot, count)
            shape = (arch.layer_count, arch.kv_head_count)
            keys = torch.randn(*shape, arch.head_size, count, generator=noise)
            values = torch.randn(*shape, count, arch.head_size, generator=noise)
            self.cache.write(slot, keys.to(self.model.device), values.to(self.model.device))
        return self.in_rows(lengths)

    def in_rows(self, lengths: list[int]) -> np.ndarray:
        """Lengths by slot, in the order of the rows."""
        return np.array([lengths[slot] for tier in self.cache.tiers for slot in tier.slots], np.int64)

    def tokens(self, seed: int, rows: int) -> torch.Tensor:
        """Input tokens of one step, int64 [rows]."""
        return torch.from_numpy(np.random.default_rng(seed).integers(0, VOCAB, rows)).to(self.model.device)

    def stepper(self, capture: Capture = lambda work: work, *, padded: bool = True) -> Stepper:
        return Stepper(self.model, self.cache, SLOTS, padded=padded, capture=capture)


def always_draft(gate: Gate, *measured: object, new_plan: bool) -> bool:
    """``Gate.measure`` of an engine that drafts whatever it has cost or brought."""
    gate.drafting = True
    return False
