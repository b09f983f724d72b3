"""Samplers that the data or the schedule of a run file excludes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from rollmesh.config.curriculum import CurriculumConfig
from rollmesh.config.data import CountdownSource, DataConfig, MixtureSource
from rollmesh.config.sampler_methods import ORDER
from rollmesh.config.schedule import ScheduleConfig


class SampledRun(Protocol):
    """Sections of a run file that a sampler depends on."""

    @property
    def curriculum(self) -> CurriculumConfig: ...
    @property
    def data(self) -> DataConfig: ...
    @property
    def schedule(self) -> ScheduleConfig: ...


def sampler_problems(config: SampledRun) -> Iterator[str]:
    """Yield the combinations that do not work."""
    sampler, source = config.curriculum.sampler, config.data.source
    if sampler == ORDER:
        return
    if config.schedule.harvest == "trajectory" or config.schedule.preset in ("sorted", "sorted_partial"):
        yield (
            f"curriculum.sampler={sampler}: with schedule.harvest=trajectory every prompt comes "
            "schedule.group_size times in a row, in the order of the source; set sampler=order"
        )
    if isinstance(source, CountdownSource) and source.puzzles is None:
        yield (
            f"curriculum.sampler={sampler}: data.source.type=countdown gives a new prompt at every draw, so there is "
            "nothing to choose from; set data.source.puzzles, or use it as a part of a mixture"
        )
    if sampler != "domain_mix":
        return
    targets = config.curriculum.sampler_options.get("targets")
    if isinstance(source, MixtureSource):
        names = [part.name for part in source.parts]
        if absent := next((name for name in targets or () if name not in names), None):
            yield (
                f"curriculum.sampler_options.targets.{absent}: data.source has no such part; "
                f"its parts are {', '.join(names)}"
            )
    elif config.data.domain_field is None:
        yield ("curriculum.sampler=domain_mix needs domains: set data.domain_field, or use data.source.type=mixture")
    elif not targets:
        yield "curriculum.sampler_options.targets: name the share of every domain; only a mixture has weights"
