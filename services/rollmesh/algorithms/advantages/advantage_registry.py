"""Advantages by their name in the run file. ``config/advantage_methods.py`` has their options."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from rollmesh.algorithms.advantages.advantage_protocol import Advantage
from rollmesh.algorithms.advantages.dr_grpo import dr_grpo
from rollmesh.algorithms.advantages.drpo import drpo
from rollmesh.algorithms.advantages.filtered_bc import filtered_bc
from rollmesh.algorithms.advantages.grpo import grpo
from rollmesh.algorithms.advantages.grpo_lambda import grpo_lambda
from rollmesh.algorithms.advantages.mc_grpo import mc_grpo
from rollmesh.algorithms.advantages.pairs import pairs
from rollmesh.algorithms.advantages.reinforce_pp import reinforce_pp
from rollmesh.algorithms.advantages.rloo import rloo
from rollmesh.algorithms.advantages.tba import tba
from rollmesh.algorithms.advantages.xrpo_novelty import xrpo_novelty

ADVANTAGES: Mapping[str, Advantage] = MappingProxyType(
    {
        "grpo": grpo,
        "dr_grpo": dr_grpo,
        "rloo": rloo,
        "reinforce_pp": reinforce_pp,
        "mc_grpo": mc_grpo,
        "grpo_lambda": grpo_lambda,
        "drpo": drpo,
        "xrpo_novelty": xrpo_novelty,
        "pairs": pairs,
        "filtered_bc": filtered_bc,
        "tba": tba,
    }
)
