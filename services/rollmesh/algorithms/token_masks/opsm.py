"""Off-policy sequence masking."""

from __future__ import annotations

from torch import Tensor

from rollmesh.algorithms.token_masks.mask_protocol import MaskInput


def opsm(data: MaskInput, *, delta: float) -> Tensor:
    """Mask the answers with ``A < 0`` and ``1 / |o| sum_t log(mu / pi_old) > delta``; bool [tokens].

    A token out of the loss counts as 0. Source: slime, whose two policies are those before and in the update.
    """
    divergence = data.sequence_mean(-data.correction())[data.sequence_index]
    return ~((data.advantages < 0) & (divergence > delta))
