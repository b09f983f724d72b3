"""Old-logprob sources by their name in the run file. ``algorithms/old_logprobs.py`` has their functions."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pydantic import Field

from rollmesh.config.methods import Method
from rollmesh.config.section import Section


class EwmaOptions(Section):
    """Options of ewma."""

    window: float = Field(default=2.0, gt=0, le=1000)
    """W, the staleness in train steps that the average is made for."""
    reset_below: float = Field(default=0.9, ge=0, le=1)
    """Share of tokens outside masks and with a gradient below which the average begins again with the current weights;
    0 never resets it."""

    @property
    def beta(self) -> float:
        """Factor of the weights that are one train step older: W / (W + 2)."""
        return self.window / (self.window + 2)


OLD_LOGPROB_METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "sampler": Method(source="our variant of CoPRIS"),
        "stage_end": Method(source="CoPRIS, arXiv 2511.05589"),
        "recompute": Method(source="decoupled PPO, arXiv 2505.24298"),
        "current": Method(source="POIS of UloRL, arXiv 2507.19766"),
        "snapshot": Method(source="Missing Old Logits, arXiv 2605.12070"),
        "loglinear": Method(
            source="AReaL (documentation)",
            deviation="versions are train steps, and that of the update is one above the weights at its start",
        ),
        "ewma": Method(
            source="revised PPO-EWMA of Missing Old Logits, arXiv 2605.12070",
            options=EwmaOptions,
            deviation="once per train step, also with several minibatches; truncated weights count as active tokens",
        ),
    }
)
