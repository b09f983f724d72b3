"""Losses by their name in the run file, with their default bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from types import MappingProxyType

from rollmesh.algorithms.losses.cispo import cispo
from rollmesh.algorithms.losses.decoupled_ppo import decoupled_ppo
from rollmesh.algorithms.losses.gspo import gspo
from rollmesh.algorithms.losses.kimi import kimi
from rollmesh.algorithms.losses.loss_protocol import LossOptions, PolicyLoss
from rollmesh.algorithms.losses.minpro import minpro
from rollmesh.algorithms.losses.ppo_clip import ppo_clip
from rollmesh.algorithms.losses.tis import tis
from rollmesh.algorithms.losses.topr import topr


@dataclass(frozen=True, slots=True, kw_only=True)
class LossDefinition:
    """Loss function and its default bounds."""

    loss: PolicyLoss
    """Function of (LossInput, LossOptions), and of its own options as keywords."""
    clip_low: float | None = None
    """Default bound; None for a loss without bounds."""
    clip_high: float | None = None

    def options(
        self,
        *,
        clip_low: float | None = None,
        clip_high: float | None = None,
        dual_clip: float | None = None,
        tis_cap: float = 2.0,
    ) -> LossOptions:
        """Return the options of a run; None selects the loss's default bound, and no dual clip."""
        low = self.clip_low if clip_low is None else clip_low
        high = self.clip_high if clip_high is None else clip_high
        return LossOptions(
            clip_low=inf if low is None else low,
            clip_high=inf if high is None else high,
            dual_clip=dual_clip,
            tis_cap=tis_cap,
        )


LOSSES: Mapping[str, LossDefinition] = MappingProxyType(
    {
        "ppo_clip": LossDefinition(loss=ppo_clip, clip_low=0.2, clip_high=0.28),
        "decoupled_ppo": LossDefinition(loss=decoupled_ppo, clip_low=0.2, clip_high=0.28),
        "tis": LossDefinition(loss=tis, clip_low=0.2, clip_high=0.28),
        "gspo": LossDefinition(loss=gspo, clip_low=3e-4, clip_high=4e-4),
        "cispo": LossDefinition(loss=cispo, clip_low=1.0, clip_high=4.0),
        "minpro": LossDefinition(loss=minpro, clip_low=0.2, clip_high=0.28),
        "topr": LossDefinition(loss=topr),
        "kimi": LossDefinition(loss=kimi),
    }
)
