"""Advice on a valid run file: the estimate of its resources, and hints for values that are unlikely to be meant."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from rich.table import Table

from rollmesh.config import RunConfig
from rollmesh.config.data import JsonlSource
from rollmesh.preflight.run_model import parameters_text
from rollmesh.scheduling import OnStale, Schedule
from rollmesh.scheduling.admission import trajectory_bytes
from rollmesh.scheduling.resolved_schedule import BYTES_PER_TOKEN

_ADMISSION_SHARE = 0.8
"""Share of the Redis memory limit above which admission of new groups waits."""
_LATE_GROUPS = {
    OnStale.PACE: "late ones continue in the next wave",
    OnStale.MASK_OLD_SEGMENTS: "late ones continue, and their old tokens leave the loss",
    OnStale.EVICT: "late ones are dropped over the bound",
    OnStale.RESTART: "late ones lose their tokens and begin again",
    OnStale.SET_ASIDE: "late ones lose their tokens and wait for a long round",
}
_SMALL_MODEL = 10_000_000
_LOW_RATE = 1e-5
_HIGH_RATE = 0.02
_SMALL_MODEL_RATE = 1e-4
_COARSE_ERROR = 0.1
_READ_TABLE_BYTES = 256 << 20
"""Size up to which a table is read to count its rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Sizes computed from a run file."""

    schedule: Schedule
    queue_bytes: int
    """Redis memory at full capacity with responses of maximum length."""
    queue_limit_bytes: int | None
    """Memory limit of the embedded server; None for an external server."""
    slot_count: int
    """Calls that all generators together decode at once."""

    def table(self) -> Table:
        """Return the estimate as a table for the console."""
        schedule, table = self.schedule, Table("quantity", "value", "meaning")
        pool = f"auto, at most {schedule.pool_size}" if schedule.auto_pool else f"{schedule.pool_size}"
        table.add_row("pool_size", pool, "trajectories in flight over the whole mesh")
        table.add_row("generator slots", f"{self.slot_count}", "calls decoded at once; below pool_size, calls wait")
        table.add_row("max_staleness", f"{schedule.max_staleness}", "train steps, enforced")
        rule = (
            "more where groups take longer than an update to be ready"
            if schedule.auto_pool
            else "about pool_size / (B n); near max_staleness where the trainer is the slower side"
        )
        table.add_row("expected staleness", f"{schedule.expected_staleness:.2f}", f"train steps, {rule}")
        batch = schedule.groups_per_batch * schedule.group_size
        table.add_row("batch", f"{batch}", "trajectories per train step")
        if schedule.spare_members:
            share = schedule.spare_members / schedule.launched_members
            table.add_row("surplus", f"{share:.0%}", "of the launched trajectories, cut off unfinished")
        if schedule.spare_groups:
            late = _LATE_GROUPS[schedule.on_stale]
            table.add_row("spare groups", f"{schedule.spare_groups}", f"open beyond the wave; {late}")
        # The lost tokens follow from the lengths, which no run file has.
        tokens = "the lost tokens: rollmesh sim RUN.yaml, column wasted"
        if schedule.on_stale is OnStale.EVICT:
            table.add_row("evicted", "depends on the lengths", f"groups over the staleness bound; {tokens}")
        elif schedule.most_begun_again:
            most = f"at most {schedule.most_begun_again:.2f}"
            table.add_row("begun again", most, f"times per trained group of a long run; {tokens}")
        if schedule.segment_tokens:
            meaning = "tokens of one policy, then a rest until the next one"
            table.add_row("segment", f"{schedule.segment_tokens}", meaning)
        table.add_row("capacity", f"{schedule.window_groups}", "groups admitted and not yet trained, at most")
        meaning = "Redis, at capacity and full length, without snapshots of environments and kept sets"
        if self.queue_limit_bytes is not None:
            share = self.queue_bytes / self.queue_limit_bytes
            advice = "; above 80% admission waits: increase it" if share > _ADMISSION_SHARE else ""
            meaning = f"{meaning}: {share:.0%} of store.maxmemory_bytes{advice}"
        table.add_row("queue memory", f"{self.queue_bytes / 2**20:.0f} MiB", meaning)
        return table


def estimate(config: RunConfig) -> Estimate:
    """Compute the estimate of ``config``. Raises ConfigError for an impossible schedule."""
    schedule = Schedule.from_config(config)
    longest = trajectory_bytes(schedule.longest_trajectory_tokens, schedule)
    per_group = config.data.max_prompt_tokens * BYTES_PER_TOKEN + schedule.most_members * round(longest)
    return Estimate(
        schedule=schedule,
        queue_bytes=schedule.window_groups * per_group,
        queue_limit_bytes=config.store.maxmemory_bytes if config.store.url is None else None,
        slot_count=config.generator.replicas * config.generator.slots,
    )


def run_hints(config: RunConfig, parameter_count: int) -> list[str]:
    """Return hints for valid values that are unlikely to be meant."""
    hints = chain(_trainer_hints(config, parameter_count), _evaluation_hints(config))
    return [f"hint: {text}" for text in hints]


def _trainer_hints(config: RunConfig, parameter_count: int) -> Iterator[str]:
    trainer, rate = config.trainer, config.trainer.learning_rate
    if rate > _HIGH_RATE:
        yield (
            f"trainer.learning_rate={rate:g} is far above what AdamW takes (1e-6 for large models, 1e-3 for an adapter "
            "or a small one): the policy will diverge in its first updates"
        )
    if parameter_count < _SMALL_MODEL and rate < _LOW_RATE:
        yield (
            f"trainer.learning_rate={rate:g} suits models of a billion parameters; one of "
            f"{parameters_text(parameter_count)} hardly changes: try {_SMALL_MODEL_RATE:g}"
        )
    if trainer.warmup_steps >= trainer.train_steps:
        yield (
            f"trainer.warmup_steps={trainer.warmup_steps} with trainer.train_steps={trainer.train_steps}: the learning "
            "rate never reaches trainer.learning_rate; lower trainer.warmup_steps"
        )
    reference = trainer.algorithm.kl_reference_version
    if reference and not (Path(config.folder) / "config.yaml").exists():
        yield (
            f"trainer.algorithm.kl_reference_version={reference}: a new run has version 0 only, and a trainer "
            "that needs a reference refuses another one; set 0, and change it once that version is published"
        )
    # A clip that cannot act: in the demo a run without one collapsed (docs/experiments.md).
    algorithm, staleness = trainer.algorithm, Schedule.from_config(config).max_staleness
    of_the_step = algorithm.old_logprobs in ("recompute", "current") and trainer.minibatches == 1
    if of_the_step and staleness and algorithm.loss_method.clips_ratio:
        yield (
            f"trainer.algorithm.old_logprobs={algorithm.old_logprobs} with trainer.minibatches=1: pi_old is the policy "
            f"itself, so {algorithm.loss} never clips, on tokens up to {staleness} train steps old; raise "
            "trainer.minibatches, or use old_logprobs=snapshot (loss ppo_clip: or sampler)"
        )


def _evaluation_hints(config: RunConfig) -> Iterator[str]:
    evaluation = config.evaluation
    if not (evaluation.before_and_after or evaluation.every_versions):
        return
    prompts = evaluation.prompt_count
    existing = _evaluation_rows(config)
    if existing is not None and existing < prompts:
        yield (
            f"evaluation.prompt_count={prompts}: the evaluation split has about {existing} prompts; add rows, raise "
            f"data.held_out_ratio={config.data.held_out_ratio:g}, or set data.evaluation_source"
        )
        prompts = existing
    if evaluation.temperature == 0 and evaluation.samples_per_prompt > 1:
        yield (
            f"evaluation.samples_per_prompt={evaluation.samples_per_prompt} with evaluation.temperature=0: greedy "
            "answers to one prompt are the same; set samples_per_prompt=1, or a temperature"
        )
    error = 0.5 / math.sqrt(prompts)
    if error > _COARSE_ERROR:
        yield (
            f"an accuracy over {prompts} prompts has a standard error of up to {error:.2f}; 256 prompts have 0.03: "
            "raise evaluation.prompt_count"
        )


def _evaluation_rows(config: RunConfig) -> int | None:
    """Return the number of rows of the evaluation split of a table; None for other sources and large tables."""
    data = config.data
    source = data.evaluation_source or data.source
    if type(source) is not JsonlSource or Path(source.path).stat().st_size > _READ_TABLE_BYTES:
        return None
    with Path(source.path).open("rb") as file:
        rows = sum(1 for line in file if line.strip())
    if data.evaluation_source is not None or data.held_out_ratio == 0:
        return rows
    return min(max(1, round(data.held_out_ratio * rows)), max(1, rows - 1))
