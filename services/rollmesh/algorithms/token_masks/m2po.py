"""M2PO: the second moment of the log-ratios is bounded by masking the largest ones."""

from __future__ import annotations

import torch
from torch import Tensor

from rollmesh.algorithms.token_masks.mask_protocol import MaskInput


def m2po(data: MaskInput, *, threshold: float) -> Tensor:
    """Mask the tokens with the largest ``log(pi_old / mu)^2`` until the mean over the others is at most ``threshold``.

    The mean is over the tokens in the loss of the whole batch; equal tokens leave from the last one on. Returns bool
    [tokens]. Source: M2PO, as in AReaL.
    """
    inside = torch.nonzero(data.mask).flatten()
    squares, order = data.correction()[inside].square().sort(stable=True)
    means = squares.cumsum(0) / torch.arange(1, len(squares) + 1, dtype=squares.dtype)
    keep = torch.ones_like(data.mask)
    # Means of sorted values never fall, so the tokens over the bound are the last ones.
    keep[inside[order[means > threshold]]] = False
    return keep
