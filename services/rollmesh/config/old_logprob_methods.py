"""Old-logprob sources by their name in the run file. ``algorithms/old_logprobs.py`` has their functions."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from rollmesh.config.methods import Method

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
    }
)
