"""Rejection by the ratio of a token, of an answer, or of its geometric mean."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rollmesh.algorithms.ratios import LOG_RATIO_LIMIT
from rollmesh.algorithms.token_masks.mask_protocol import MaskInput


def ratio_bounds(
    data: MaskInput,
    *,
    token: Sequence[float] | None,
    sequence: Sequence[float] | None,
    geometric: Sequence[float] | None,
    veto: float | None,
) -> Tensor:
    """Keep the tokens whose ratios ``pi_old / mu`` are within all bounds [low, high] that are not None; bool [tokens].

    ``token`` bounds the ratio of the token, ``sequence`` the product over its answer, ``geometric`` the |o|-th root of
    the product. ``veto`` masks an answer with a token ratio below it. A token out of the loss counts as a ratio of 1.
    Source: the rejection sampling of verl.
    """
    logs = data.correction()
    keep = torch.ones_like(data.mask)
    if token is not None:
        keep &= _within(logs, token)
    if sequence is not None:
        keep &= _within(data.sequence_sum(logs), sequence)[data.sequence_index]
    if geometric is not None:
        keep &= _within(data.sequence_mean(logs), geometric)[data.sequence_index]
    if veto is not None:
        keep &= (data.sequence_sum((logs.exp() < veto).double()) == 0)[data.sequence_index]
    return keep


def _within(logs: Tensor, bounds: Sequence[float]) -> Tensor:
    ratios = logs.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return (ratios >= bounds[0]) & (ratios <= bounds[1])
