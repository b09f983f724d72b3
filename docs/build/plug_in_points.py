"""Plug-in points of the curriculum and the trainer: their fields, own examples, and the source text of a contract."""

import ast
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType, ModuleType

from rollmesh import group_outcome, prompt_history
from rollmesh.algorithms import advantages, losses, token_masks
from rollmesh.curriculum import budgets, planners, prompt_tables, shapers


@dataclass(frozen=True, slots=True)
class PlugInPoint:
    """One field that names a method."""

    title: str
    page: str
    """Name of its page without ending."""
    field: str
    """Field of the run file that names the method."""
    contract: str = ""
    """Source text of the types that a function of a user has to fit; empty if it takes no user's code."""
    own: str = ""
    """File in ``examples`` with one of a user's own."""


def plug_in_points() -> Mapping[str, PlugInPoint]:
    """Return the points by their name in ``rollmesh config methods``, in the order of the pages."""
    sampler = protocol_source(prompt_tables, "Draw", "PromptTable", "History", "Sampler")
    outcome = protocol_source(group_outcome, "MemberOutcome", "GroupOutcome")
    record = protocol_source(prompt_history, "PromptRecord")
    planner = "\n\n\n".join((protocol_source(planners, "Round", "RolloutPlanner"), outcome, record))
    shaper, budget = protocol_source(shapers, "Closing", "GroupShaper"), protocol_source(budgets, "Budget")
    advantage = protocol_source(advantages, "TrajectoryColumns", "Advantage")
    loss = protocol_source(losses, "ClipReason", "LossInput", "LossOptions", "TokenLoss", "PolicyLoss")
    mask = protocol_source(token_masks, "MaskInput", "TokenMask")
    learn, algorithm = "curriculum", "trainer.algorithm"
    return MappingProxyType(
        {
            "sampler": PlugInPoint("Samplers", learn, "curriculum.sampler", sampler, "own_sampler.py"),
            "planner": PlugInPoint("Planners", learn, "curriculum.planner", planner, "own_planner.py"),
            "group_shaper": PlugInPoint("Group shapers", learn, "curriculum.group_shaper", shaper),
            "budget": PlugInPoint("Budgets", learn, "curriculum.token_budget", budget),
            "advantage": PlugInPoint(
                "Advantages", "advantages", f"{algorithm}.advantage", advantage, "own_advantage.py"
            ),
            "loss": PlugInPoint("Losses", "losses", f"{algorithm}.loss", loss, "own_loss.py"),
            "masks": PlugInPoint("Token masks", "token-masks", f"{algorithm}.masks", mask),
            "old_logprobs": PlugInPoint("Old-logprob sources", "old-logprobs", f"{algorithm}.old_logprobs"),
            "update_scale": PlugInPoint("Update scales", "old-logprobs", f"{algorithm}.update_scale"),
            "replay": PlugInPoint("Replay", "old-logprobs", "trainer.replay.by"),
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
