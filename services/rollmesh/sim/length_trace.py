"""Length trace: one JSON line per trajectory, with the tokens of its turns.

    {"group": "p7", "stream": 0, "prompt_len": 120, "out_lens": [35, 60], "obs_lens": [200], "tool_seconds": [0.4]}

``out_lens`` are the sampled tokens of each turn, ``obs_lens`` the tokens that the environment adds after a turn, and
``tool_seconds``, which may be missing, the time until it adds them. The last turn may have both or neither.
Trajectories with equal ``group`` answer the same prompt, and ``stream`` tells them apart.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Self

from rollmesh.errors import ConfigError
from rollmesh.sim.lengths_of_run import trained_groups
from rollmesh.types import Group, SegmentSource, Trajectory

_REMEDY = "write one with: rollmesh sim --export RUN_FOLDER"


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedTrajectory:
    """Tokens of one recorded trajectory. Raises ConfigError for numbers that no trajectory has."""

    group: str
    stream: str
    prompt_tokens: int
    outputs: tuple[int, ...]
    """Sampled tokens of each turn."""
    observations: tuple[int, ...] = ()
    """Tokens of the environment after each turn; those after the last turn have no effect."""
    tool_seconds: tuple[float, ...] = ()
    """Time until each of them is there; 0 if missing."""

    def __post_init__(self) -> None:
        turns = len(self.outputs)
        _require("prompt_len", self.prompt_tokens, self.prompt_tokens >= 1, "at least 1 token")
        _require("out_lens", list(self.outputs), min(self.outputs, default=0) >= 1, "turns of at least 1 token")
        for name, values in (("obs_lens", self.observations), ("tool_seconds", self.tool_seconds)):
            fits = len(values) in (turns - 1, turns) or (name == "tool_seconds" and not values)
            _require(name, list(values), fits, f"{turns - 1} or {turns} numbers for {turns} turns in out_lens")
            _require(name, list(values), all(0 <= value < math.inf for value in values), "finite numbers, 0 or more")

    @property
    def name(self) -> str:
        """Group and stream, for messages."""
        return f"group={self.group}, stream={self.stream}"

    def tokens_after_prompt(self, cap: int) -> int:
        """Return the tokens of its turns and of the environment between them, if the sampled ones end at ``cap``."""
        sampled = context = 0
        for number, output in enumerate(self.outputs):
            before = self.observations[number - 1] if number else 0
            context += before + min(output, cap - sampled)
            sampled += output
            if sampled >= cap:
                break
        return context

    @classmethod
    def read(cls, line: str) -> Self:
        """Read a line of a trace; raises ConfigError for anything else."""
        try:
            fields: Mapping[str, Any] = json.loads(line)
            return cls(
                group=str(fields["group"]),
                stream=str(fields["stream"]),
                prompt_tokens=_whole(fields["prompt_len"]),
                outputs=tuple(map(_whole, fields["out_lens"])),
                observations=tuple(map(_whole, fields["obs_lens"])),
                tool_seconds=tuple(map(float, fields.get("tool_seconds", ()))),
            )
        except KeyError as error:
            raise ConfigError(f"{error.args[0]}: missing; {_REMEDY}") from None
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigError(f"expected a trajectory of a length trace: {error}; {_REMEDY}") from None

    def line(self) -> str:
        """Return the line of a trace."""
        document = {
            "group": self.group,
            "stream": self.stream,
            "prompt_len": self.prompt_tokens,
            "out_lens": self.outputs,
            "obs_lens": self.observations,
        }
        return json.dumps(document | ({"tool_seconds": self.tool_seconds} if self.tool_seconds else {}))


def read_trace(path: Path) -> tuple[TracedTrajectory, ...]:
    """Read a trace file. Raises ConfigError with the number of a line that is no trajectory, or without a line."""
    trajectories = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                trajectories.append(TracedTrajectory.read(line))
            except ConfigError as error:
                raise ConfigError(f"lengths={path}: line {number}: {error}") from error
    if not trajectories:
        raise ConfigError(f"lengths={path}: no trajectories; {_REMEDY}")
    return tuple(trajectories)


def trace_of_run(run_folder: Path) -> Iterator[TracedTrajectory]:
    """Yield the trajectories that a run has trained on, in the order of admission; those of a prompt are one group.

    Raises DataError and CheckpointError as ``lengths_of_run`` does. A run does not record the seconds of its tools.
    """
    groups = ((group.admission_index, _traced(group)) for group in trained_groups(run_folder))
    streams: Counter[str] = Counter()
    for _, trajectories in sorted(groups, key=lambda item: item[0]):
        for trajectory in trajectories:
            yield replace(trajectory, stream=str(streams[trajectory.group]))
            streams[trajectory.group] += 1


def _traced(group: Group) -> list[TracedTrajectory]:
    return [
        traced_trajectory(member, str(member.member_index))
        for member in sorted(group.trajectories, key=lambda trajectory: trajectory.member_index)
        if any(segment.source is SegmentSource.POLICY for segment in member.segments)
    ]


def traced_trajectory(trajectory: Trajectory, stream: str) -> TracedTrajectory:
    """Return the turns of a trajectory; tokens of the environment before the first sampled one count as prompt."""
    opening, outputs, observations = 0, [], []
    for source, segments in groupby(trajectory.segments, lambda segment: segment.source):
        tokens = sum(map(len, segments))
        if source is SegmentSource.POLICY:
            outputs.append(tokens)
        elif outputs:
            observations.append(tokens)
        else:
            opening = tokens
    return TracedTrajectory(
        group=trajectory.prompt.prompt_id,
        stream=stream,
        prompt_tokens=len(trajectory.prompt.token_ids) + opening,
        outputs=tuple(outputs),
        observations=tuple(observations),
    )


def by_group(trajectories: Iterable[TracedTrajectory]) -> tuple[tuple[TracedTrajectory, ...], ...]:
    """Return the trajectories of each group, groups in the order of their first trajectory."""
    groups: dict[str, list[TracedTrajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.group, []).append(trajectory)
    return tuple(map(tuple, groups.values()))


def _whole(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{value!r} is no whole number")
    return value


def _require(name: str, value: object, holds: bool, expected: str) -> None:
    if not holds:
        raise ConfigError(f"{name}={value}: expected {expected}; {_REMEDY}")
