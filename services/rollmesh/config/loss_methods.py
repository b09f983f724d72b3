"""Losses by their name in the run file. ``algorithms/losses/loss_registry.py`` has their functions and bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from pydantic import Field

from rollmesh.config.methods import Method
from rollmesh.config.section import Section


@dataclass(frozen=True, slots=True, kw_only=True)
class LossMethod(Method):
    """One loss."""

    has_bounds: bool = True
    """Reads ``clip_low`` and ``clip_high``."""
    has_dual_clip: bool = False
    aggregation: str = "token_mean"
    """Aggregation unless the run file names one."""
    corrects_behavior: bool = False
    """Weights by pi_old over the behavior policy, so it needs a trainer-side pi_old."""
    pulls_without_advantage: bool = False
    """Has a gradient where the advantage is 0."""


class KimiOptions(Section):
    """Options of kimi."""

    tau: float = Field(default=0.1, gt=0)
    """Weight of the squared log-ratio."""


LOSS_METHODS: Mapping[str, LossMethod] = MappingProxyType(
    {
        "ppo_clip": LossMethod(source="arXiv 1707.06347, 2503.14476, 1912.09729", has_dual_clip=True),
        "decoupled_ppo": LossMethod(source="AReaL, arXiv 2505.24298", has_dual_clip=True, corrects_behavior=True),
        "tis": LossMethod(source="slime, verl", has_dual_clip=True, corrects_behavior=True),
        "gspo": LossMethod(
            source="GSPO, arXiv 2507.18071",
            aggregation="sequence_mean_token_mean",
            deviation="a masked token counts as a ratio of 1",
        ),
        "cispo": LossMethod(source="MiniMax-M1, arXiv 2506.13585"),
        "minpro": LossMethod(
            source="MinPRO, arXiv 2601.22718",
            deviation="a masked token counts as a ratio of 1; bounds of DAPO, because the source's are not known",
        ),
        "topr": LossMethod(
            source="TOPR, arXiv 2503.14286",
            has_bounds=False,
            deviation="one ratio per token instead of one per answer",
        ),
        "kimi": LossMethod(
            source="Kimi k1.5, arXiv 2501.12599",
            options=KimiOptions,
            has_bounds=False,
            pulls_without_advantage=True,
            deviation="per token, as in ROLL; the optimizer keeps its moments",
        ),
    }
)


def loss_aggregation(name: str) -> str:
    """Return the default aggregation of a loss; a user's code has that of ppo_clip."""
    return LOSS_METHODS.get(name, LOSS_METHODS["ppo_clip"]).aggregation
