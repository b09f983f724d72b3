"""Length trace: one JSON line per trajectory, with the tokens of its turns.

    {"group": "p7", "stream": 0, "prompt_len": 120, "out_lens": [35, 60], "obs_lens": [200], "tool_seconds": [0.4]}

``out_lens`` are the sampled tokens of each turn, ``obs_lens`` the tokens that the environment adds after a turn, and
``tool_seconds``, which may be missing, the time until it adds them. The last turn may have both or neither.
Trajectories with equal ``group`` answer the same prompt, and ``stream`` tells them apart.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, zip_longest
from pathlib import Path
from typing import Annotated, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rollmesh.config.section import problems_of
from rollmesh.errors import ConfigError, DataError
from rollmesh.report.audit import open_checkpoints
from rollmesh.report.recorded_run import RecordedRun
from rollmesh.sim.simulated_calls import SimulatedTurn
from rollmesh.types import Float64Array, Int32Array, SegmentSource, Trajectory

_REMEDY = "write one with: rollmesh sim --export RUN_FOLDER"
_MOST_TOKENS = 2**31 - 1
"""Most tokens of a trajectory: lengths are int32."""


class TracedTrajectory(BaseModel):
    """Tokens of one recorded trajectory. Raises ValidationError for numbers that no trajectory has."""

    model_config = ConfigDict(frozen=True, coerce_numbers_to_str=True, allow_inf_nan=False)

    group: str
    stream: str
    prompt_tokens: int = Field(ge=1, strict=True, alias="prompt_len")
    outputs: tuple[Annotated[int, Field(ge=1, strict=True)], ...] = Field(min_length=1, alias="out_lens")
    """Sampled tokens of each turn."""
    observations: tuple[Annotated[int, Field(ge=0, strict=True)], ...] = Field(alias="obs_lens")
    """Tokens of the environment after each turn; those after the last turn have no effect."""
    tool_seconds: tuple[Annotated[float, Field(ge=0)], ...] = ()
    """Time until each of them is there; 0 if missing."""

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        turns = len(self.outputs)
        for name, values in (("obs_lens", self.observations), ("tool_seconds", self.tool_seconds)):
            if len(values) not in (turns - 1, turns) and (values or name == "obs_lens"):
                raise ValueError(
                    f"{name}={list(values)}: expected {turns - 1} or {turns} numbers for {turns} turns in out_lens"
                )
        total = self.prompt_tokens + sum(self.outputs) + sum(self.observations)
        if total > _MOST_TOKENS:
            raise ValueError(
                f"prompt_len, out_lens and obs_lens: total={total}: expected at most {_MOST_TOKENS} tokens"
            )
        return self

    @property
    def name(self) -> str:
        """Group and stream, for messages."""
        return f"group={self.group}, stream={self.stream}"

    @property
    def longest_context(self) -> int:
        """Most tokens after the prompt that a call ends with: its turns and the environment between them."""
        return sum(self.outputs) + sum(self.observations[: len(self.outputs) - 1])

    def cut(self, budget: int) -> Self:
        """Return what a run with a budget of so many tokens keeps, tokens of the environment included.

        A worker samples until the budget is used up, and ends a trajectory when the tokens of the environment leave no
        room for one more (``worker/environment_program.py``).
        """
        outputs: list[int] = []
        left = budget
        for output, observation in zip_longest(self.outputs, self.observations, fillvalue=0):
            if left <= 0:
                break
            outputs.append(min(output, left))
            left -= output + observation
        between = len(outputs) - 1
        return self.model_copy(
            update={
                "outputs": tuple(outputs),
                "observations": self.observations[:between],
                "tool_seconds": self.tool_seconds[:between],
            }
        )

    def line(self) -> str:
        """Return the line of a trace."""
        return self.model_dump_json(by_alias=True, exclude=None if self.tool_seconds else {"tool_seconds"})


def read_trace(path: Path) -> tuple[TracedTrajectory, ...]:
    """Read a trace file. Raises ConfigError with the number of a line that is no trajectory, or without a line."""
    trajectories = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                trajectories.append(TracedTrajectory.model_validate_json(line))
            except ValidationError as error:
                raise ConfigError(f"lengths={path}: line {number}: {problems_of(error)}; {_REMEDY}") from error
    if not trajectories:
        raise ConfigError(f"lengths={path}: no trajectories; {_REMEDY}")
    return tuple(trajectories)


def trace_of_run(run_folder: Path) -> Iterator[TracedTrajectory]:
    """Yield the trajectories that a run has trained on, in the order of admission; those of a prompt are one group.

    A run does not record the seconds of its tools.

    Raises DataError for a folder without a trained group, CheckpointError for a damaged batch file or a missing secret.
    """
    store = open_checkpoints(RecordedRun(run_folder))
    steps = store.batch_steps()
    if not steps:
        raise DataError(
            f"{run_folder}: no finished trajectories; lengths come from finished train steps: "
            "give a run that has trained"
        )
    # Without their tokens: all batch files together may not fit the memory.
    traced = [
        (group.admission_index, member.member_index, traced_trajectory(member))
        for step in steps
        for group in store.read_batch(step).groups
        for member in group.trajectories
        if any(segment.source is SegmentSource.POLICY for segment in member.segments)
    ]
    streams: Counter[str] = Counter()
    for _, _, trajectory in sorted(traced, key=lambda item: item[:2]):
        yield trajectory.model_copy(update={"stream": str(streams[trajectory.group])})
        streams[trajectory.group] += 1


def traced_trajectory(trajectory: Trajectory) -> TracedTrajectory:
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
        stream="0",
        prompt_len=len(trajectory.prompt.token_ids) + opening,
        out_lens=tuple(outputs),
        obs_lens=tuple(observations),
    )


def by_group(trajectories: Iterable[TracedTrajectory]) -> tuple[tuple[TracedTrajectory, ...], ...]:
    """Return the trajectories of each group, groups in the order of their first trajectory."""
    groups: dict[str, list[TracedTrajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.group, []).append(trajectory)
    return tuple(map(tuple, groups.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedLengths:
    """Recorded turns of all trajectories of a run, cut to its budget."""

    groups: tuple[tuple[TracedTrajectory, ...], ...]
    seed: int = 0

    def draw(self, position: int, prompt: int, members: int, *, step: float = 0.0) -> Int32Array:
        """Return the sampled tokens of the first members of a group, as ``LengthModel.draw`` does."""
        return np.array([sum(chosen.outputs) for chosen in self._chosen(position, prompt, members)], dtype=np.int32)

    def quantiles(self, probabilities: Sequence[float]) -> Float64Array:
        """Return the sampled tokens at these probabilities."""
        totals = [sum(trajectory.outputs) for group in self.groups for trajectory in group]
        return np.quantile(totals, probabilities)

    def prompt_tokens(self, prompt: int) -> int:
        """Return the tokens of a prompt: the most that a trajectory of its group has."""
        return max(trajectory.prompt_tokens for trajectory in self._group(prompt))

    def turns(self, position: int, prompt: int, members: int) -> tuple[tuple[SimulatedTurn, ...], ...]:
        """Return the turns before the last one of the first members of a group."""
        return tuple(_turns(chosen) for chosen in self._chosen(position, prompt, members))

    def longest(self) -> tuple[int, TracedTrajectory]:
        """Return the largest context of a call, in tokens, and the trajectory that has it."""
        each = (
            (self.prompt_tokens(prompt) + trajectory.longest_context, trajectory)
            for prompt, group in enumerate(self.groups)
            for trajectory in group
        )
        return max(each, key=lambda item: item[0])

    def _group(self, prompt: int) -> tuple[TracedTrajectory, ...]:
        return self.groups[prompt % len(self.groups)]

    def _chosen(self, position: int, prompt: int, members: int) -> list[TracedTrajectory]:
        group = self._group(prompt)
        counter = np.array([0, 0, 2, position], dtype=np.uint64)
        numbers = np.random.Generator(np.random.Philox(key=self.seed, counter=counter))
        order = numbers.permutation(len(group)).tolist()
        further = (numbers.random(max(0, members - len(group))) * len(group)).astype(int).tolist()
        return [group[index] for index in [*order, *further][:members]]


def _turns(trajectory: TracedTrajectory) -> tuple[SimulatedTurn, ...]:
    ends = accumulate(trajectory.outputs[:-1])
    seconds = trajectory.tool_seconds or (0.0,) * len(trajectory.outputs)
    between = zip(ends, trajectory.observations, seconds, strict=False)
    return tuple(SimulatedTurn(*turn) for turn in between)
