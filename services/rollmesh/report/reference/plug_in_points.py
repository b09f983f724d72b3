"""Plug-in points of the curriculum and the trainer: their fields, contracts and own examples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from rollmesh import group_outcome, prompt_history
from rollmesh.algorithms.advantages import advantage_protocol
from rollmesh.algorithms.losses import loss_protocol
from rollmesh.algorithms.token_masks import mask_protocol
from rollmesh.curriculum import budget_protocol, planner_protocol, sampler_protocol, shaper_protocol
from rollmesh.report.reference.protocol_source import protocol_source


@dataclass(frozen=True, slots=True, kw_only=True)
class PlugInPoint:
    """One field that names a method."""

    title: str
    page: str
    """Name of its page without ending."""
    field: str
    """Field of the run file that names the method."""
    contract: str
    """Source text of the types that a function of a user has to fit; empty if it takes no user's code."""
    own: str = ""
    """File in ``examples`` with one of a user's own."""


def _contracts() -> Mapping[str, str]:
    outcome = protocol_source(group_outcome, "MemberOutcome", "GroupOutcome")
    record = protocol_source(prompt_history, "PromptRecord")
    return {
        "sampler": protocol_source(sampler_protocol, "Draw", "PromptTable", "History", "PromptSampler"),
        "planner": "\n\n\n".join((protocol_source(planner_protocol, "Round", "RolloutPlanner"), outcome, record)),
        "group_shaper": protocol_source(shaper_protocol, "Closing", "GroupShaper"),
        "budget": protocol_source(budget_protocol, "Budget"),
        "advantage": protocol_source(advantage_protocol, "TrajectoryColumns", "Advantage"),
        "loss": protocol_source(loss_protocol, "ClipReason", "LossInput", "LossOptions", "TokenLoss", "PolicyLoss"),
        "masks": protocol_source(mask_protocol, "MaskInput", "TokenMask"),
    }


def plug_in_points() -> Mapping[str, PlugInPoint]:
    """Return the points by their name in ``rollmesh methods``, in the order of the pages."""
    contract = _contracts()
    algorithm = "trainer.algorithm"
    return MappingProxyType(
        {
            "sampler": PlugInPoint(
                title="Samplers",
                page="curriculum",
                field="curriculum.sampler",
                contract=contract["sampler"],
                own="own_sampler.py",
            ),
            "planner": PlugInPoint(
                title="Planners",
                page="curriculum",
                field="curriculum.planner",
                contract=contract["planner"],
                own="own_planner.py",
            ),
            "group_shaper": PlugInPoint(
                title="Group shapers",
                page="curriculum",
                field="curriculum.group_shaper",
                contract=contract["group_shaper"],
            ),
            "budget": PlugInPoint(
                title="Budgets", page="curriculum", field="curriculum.token_budget", contract=contract["budget"]
            ),
            "advantage": PlugInPoint(
                title="Advantages",
                page="advantages",
                field=f"{algorithm}.advantage",
                contract=contract["advantage"],
                own="own_advantage.py",
            ),
            "loss": PlugInPoint(
                title="Losses",
                page="losses",
                field=f"{algorithm}.loss",
                contract=contract["loss"],
                own="own_loss.py",
            ),
            "masks": PlugInPoint(
                title="Token masks", page="token-masks", field=f"{algorithm}.masks", contract=contract["masks"]
            ),
            "old_logprobs": PlugInPoint(
                title="Old-logprob sources", page="old-logprobs", field=f"{algorithm}.old_logprobs", contract=""
            ),
            "update_scale": PlugInPoint(
                title="Update scales", page="old-logprobs", field=f"{algorithm}.update_scale", contract=""
            ),
            "replay": PlugInPoint(title="Replay", page="old-logprobs", field="trainer.replay.by", contract=""),
        }
    )
