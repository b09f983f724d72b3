"""Fixed facts of a run, from its run file."""

from __future__ import annotations

import rollmesh
from rollmesh.config import RunConfig
from rollmesh.gateway.models.api_model import About
from rollmesh.scheduling import Schedule


def run_facts(config: RunConfig, *, text: bool) -> About:
    """Return the facts; ``text`` is true if tokens come with their text."""
    schedule = Schedule.from_config(config)
    return About(
        run=config.name,
        version=rollmesh.__version__,
        folder=config.folder,
        train_steps=config.trainer.train_steps,
        group_size=schedule.group_size,
        groups_per_batch=config.schedule.groups_per_batch,
        max_staleness=schedule.max_staleness,
        text=text,
        token_for_reads=config.gateway.token_for_reads,
        sample_seconds=config.gateway.sample_seconds,
    )
