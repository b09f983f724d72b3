"""Plug-in points of the curriculum and the trainer: their fields, own examples, and the source text of a contract."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType, ModuleType

from rollmesh import group_outcome, prompt_history
from rollmesh.algorithms import advantages, losses, token_masks
from rollmesh.curriculum import budgets, planners, prompt_tables, shapers


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
        "sampler": protocol_source(prompt_tables, "Draw", "PromptTable", "History", "Sampler"),
        "planner": "\n\n\n".join((protocol_source(planners, "Round", "RolloutPlanner"), outcome, record)),
        "group_shaper": protocol_source(shapers, "Closing", "GroupShaper"),
        "budget": protocol_source(budgets, "Budget"),
        "advantage": protocol_source(advantages, "TrajectoryColumns", "Advantage"),
        "loss": protocol_source(losses, "ClipReason", "LossInput", "LossOptions", "TokenLoss", "PolicyLoss"),
        "masks": protocol_source(token_masks, "MaskInput", "TokenMask"),
    }


def plug_in_points() -> Mapping[str, PlugInPoint]:
    """Return the points by their name in ``rollmesh config methods``, in the order of the pages."""
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


def protocol_source(module: ModuleType, *names: str) -> str:
    """Return the definitions of a module's top-level names, with the docstrings below them, in the order of the file.

    A comment above them says how to import them.
    Raises LookupError for a name that the module does not define.
    """
    text = inspect.getsource(module)
    found = dict(_definitions(text))
    if missing := [name for name in names if name not in found]:
        raise LookupError(f"{module.__name__} defines no {missing[0]}")
    imported = f"# from {module.__name__} import {', '.join(names)}"
    return "\n\n\n".join((imported, *(found[name] for name in found if name in names)))


def _definitions(text: str) -> Iterator[tuple[str, str]]:
    lines = text.splitlines()
    body = ast.parse(text).body
    for at, node in enumerate(body):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                start = min((decorator.lineno for decorator in node.decorator_list), default=node.lineno)
                yield name, "\n".join(lines[start - 1 : node.end_lineno])
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                after = body[at + 1] if at + 1 < len(body) else node
                documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                yield name, "\n".join(lines[node.lineno - 1 : (after if documented else node).end_lineno])
