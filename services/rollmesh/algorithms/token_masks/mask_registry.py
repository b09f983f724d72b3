"""Token masks by their name in the run file."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from rollmesh.algorithms.token_masks.icepop import icepop
from rollmesh.algorithms.token_masks.m2po import m2po
from rollmesh.algorithms.token_masks.mask_protocol import TokenMask
from rollmesh.algorithms.token_masks.mastered import mastered
from rollmesh.algorithms.token_masks.opsm import opsm
from rollmesh.algorithms.token_masks.ratio_bounds import ratio_bounds

MASKS: Mapping[str, TokenMask] = MappingProxyType(
    {"icepop": icepop, "ratio": ratio_bounds, "opsm": opsm, "m2po": m2po, "mastered": mastered}
)
