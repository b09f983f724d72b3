"""IcePop: tokens whose engine and trainer disagree leave the loss."""

from __future__ import annotations

from torch import Tensor

from rollmesh.algorithms.token_masks.mask_protocol import MaskInput


def icepop(data: MaskInput, *, low: float, high: float) -> Tensor:
    """Keep the tokens with ``low <= pi_old / mu <= high``; bool [tokens]. Source: IcePop, as in verl."""
    ratios = data.correction().exp()
    return (ratios >= low) & (ratios <= high)
