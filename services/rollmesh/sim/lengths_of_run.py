"""Lengths of the trajectories that a run has trained on, by prompt and member, from its batch files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rollmesh.errors import DataError
from rollmesh.report.audit import open_checkpoints
from rollmesh.report.recorded_run import RecordedRun
from rollmesh.types import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLengths:
    """Tokens of one trained group."""

    admission_index: int
    """Position of the group in the order of admission."""
    prompt_id: str
    prompt_tokens: int
    response_tokens: tuple[int, ...]
    """Tokens after the prompt, those of the environment included, in the order of the members."""


def lengths_of_run(run_folder: Path) -> tuple[GroupLengths, ...]:
    """Read the trained groups of a run, in the order of admission.

    Raises DataError for a folder without a trained group, CheckpointError for a damaged batch file or a missing secret.
    """
    groups = map(_lengths, trained_groups(run_folder))
    return tuple(sorted(groups, key=lambda group: group.admission_index))


def trained_groups(run_folder: Path) -> Iterator[Group]:
    """Yield the trained groups of a run, one train step after the other; raises the errors of ``lengths_of_run``."""
    store = open_checkpoints(RecordedRun(run_folder))
    steps = store.batch_steps()
    if not steps:
        raise DataError(
            f"{run_folder}: no finished trajectories; lengths come from finished train steps: "
            "give a run that has trained"
        )
    for step in steps:
        yield from store.read_batch(step).groups


def _lengths(group: Group) -> GroupLengths:
    members = sorted(group.trajectories, key=lambda trajectory: trajectory.member_index)
    prompt = members[0].prompt
    return GroupLengths(
        admission_index=group.admission_index,
        prompt_id=prompt.prompt_id,
        prompt_tokens=len(prompt.token_ids),
        response_tokens=tuple(member.response_token_count for member in members),
    )
