"""Micro-batches without padding: sequences concatenated, with the tokens that they begin with in common once."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rollmesh.kept_sets import join_sets, pair_sets
from rollmesh.trainer.learner.packed_attention import PackedLayout
from rollmesh.trainer.learner.prefix_tree import prefix_tree
from rollmesh.trainer.learner.train_batch import TokenBatch
from rollmesh.types import Int32Array, Int64Array, KeptSets


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Inputs of one forward pass: the packed row and the tokens to score."""

    input_ids: Tensor  # int64 [1, tokens]
    position_ids: Tensor  # int64 [1, tokens]
    layout: PackedLayout
    rows: Tensor  # int64 [scored], position whose hidden state predicts the scored token; shared ones repeat
    targets: Tensor  # int64 [scored]
    temperatures: Tensor | None  # float32 [scored]; None when all are 1
    kept: Tensor | None  # int64 [2, ids], pairs (place in [scored], id) of the kept sets
    token_index: Int64Array  # [scored], index of the scored token in the flat batch
    sequence_index: Tensor  # int64 [scored], sequence inside the micro-batch
    sequence_count: int

    @property
    def token_count(self) -> int:
        """Number of tokens in the forward pass."""
        return self.input_ids.shape[1]


def pack(
    batch: TokenBatch, sequences: Sequence[int], device: torch.device, least_saved: int | None = None
) -> MicroBatch:
    """Concatenate these sequences of the batch; the tokens of its policy mask are scored.

    The last token of a sequence predicts no token and is dropped. Without sequences the result is a dummy of one token
    that scores nothing: a rank without work must still join the collectives. ``least_saved`` is that of
    ``prefix_tree``.
    """
    pieces = [(np.zeros(2, np.int32), np.empty(0, np.int64), 0)]
    if sequences:
        bounds = [(int(batch.starts[s]), int(batch.starts[s + 1])) for s in sequences]
        pieces = [(batch.token_ids[a:b], np.flatnonzero(batch.policy_mask[a:b]), a) for a, b in bounds]
    temperatures = batch.temperatures[np.concatenate([scored + start for _, scored, start in pieces])]
    return _assemble(pieces, None if (temperatures == 1).all() else temperatures, batch.kept_sets, device, least_saved)


def pack_sequences(
    sequences: Sequence[Int32Array],
    temperature: float,
    device: torch.device,
    kept_sets: Sequence[KeptSets | None] | None = None,
    least_saved: int | None = None,
    unscored: Sequence[int] | None = None,
) -> MicroBatch:
    """Concatenate token ids; every token but the first of each sequence is scored, over its kept set if it has one.

    ``unscored`` are the numbers of tokens at the start of each sequence that are not scored; 1 by default.
    """
    starts = accumulate((len(ids) for ids in sequences), initial=0)
    skipped = unscored or [1] * len(sequences)
    pieces = [(ids, np.arange(n, len(ids)), start) for ids, n, start in zip(sequences, skipped, starts, strict=False)]
    scored = sum(len(positions) for _, positions, _ in pieces)
    temperatures = None if temperature == 1 else np.full(scored, temperature, np.float32)
    sets = join_sets((len(ids), each) for ids, each in zip(sequences, kept_sets or (), strict=False))
    return _assemble(pieces, temperatures, sets, device, least_saved)


def _assemble(
    pieces: Sequence[tuple[Int32Array, Int64Array, int]],
    temperatures: npt.NDArray[np.float32] | None,
    sets: KeptSets | None,
    device: torch.device,
    least_saved: int | None,
) -> MicroBatch:
    """Pack the token ids of sequences, their scored positions, and the start of each in the flat batch."""
    inputs = [ids[:-1] for ids, _, _ in pieces]
    tree = prefix_tree(inputs, least_saved)
    spans = [(inputs[b.source], b.depth, b.depth + b.end - b.start) for b in tree.branches]
    rows = [tree.path(last)[scored - 1] for last, (_, scored, _) in zip(tree.last, pieces, strict=True)]
    token_index = np.concatenate([scored + start for _, scored, start in pieces])
    kept = pair_sets(sets, token_index)
    owners = np.repeat(np.arange(len(rows), dtype=np.int64), [len(r) for r in rows])

    def tensor(array: npt.NDArray[np.int64] | npt.NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(device)

    return MicroBatch(
        input_ids=tensor(np.concatenate([ids[start:end] for ids, start, end in spans]))[None],
        position_ids=tensor(np.concatenate([np.arange(start, end) for _, start, end in spans]))[None],
        layout=PackedLayout.of(tree, device),
        rows=tensor(np.concatenate(rows)),
        targets=tensor(np.concatenate([ids[scored] for ids, scored, _ in pieces])),
        temperatures=None if temperatures is None else torch.from_numpy(temperatures).to(device),
        kept=None if kept is None else tensor(kept),
        token_index=token_index,
        sequence_index=tensor(owners),
        sequence_count=len(rows),
    )
