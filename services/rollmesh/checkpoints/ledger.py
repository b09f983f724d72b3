"""Ledger of the trained groups by train step, from batch files and committed states only, without Redis."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rollmesh.checkpoints.batches import BatchFooter
from rollmesh.checkpoints.committed import CommittedState
from rollmesh.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Trained groups, with every violation of "each group once"."""

    committed_step: int
    """Train step of the newest committed state; -1 without one."""
    groups: Mapping[int, tuple[str, ...]]
    """Group ids in training order, by train step, up to the committed one."""
    damaged: Mapping[int, str]
    """Train steps whose batch file is missing or damaged, with the reason."""
    trained_twice: Mapping[str, tuple[int, ...]]
    """Train steps of each group that more than one step consumed."""


def read_ledger(states: Sequence[CommittedState], footer: Callable[[int], BatchFooter]) -> Ledger:
    """Read the footers of all batch files up to the newest committed state. ``states`` are newest first."""
    last = states[0].train_step if states else -1
    groups: dict[int, tuple[str, ...]] = {}
    damaged: dict[int, str] = {}
    steps: dict[str, list[int]] = {}
    for step in range(1, last + 1):
        try:
            groups[step] = tuple(footer(step).group_ids)
        except CheckpointError as error:
            damaged[step] = str(error)
            continue
        for group_id in groups[step]:
            steps.setdefault(group_id, []).append(step)
    twice = {group_id: tuple(s) for group_id, s in steps.items() if len(s) > 1}
    return Ledger(committed_step=last, groups=groups, damaged=damaged, trained_twice=twice)
