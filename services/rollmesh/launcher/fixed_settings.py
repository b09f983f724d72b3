"""Settings that are fixed for a whole run, with the reasons; all others may change when the run is continued.

The data of the run depends on the fixed settings: after a change, the data written before and after it would not be
comparable. A section name includes all of its fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rollmesh.config import RunConfig
from rollmesh.errors import ConfigError
from rollmesh.scheduling import Schedule

_NOT_COMPARABLE = "rewards and evaluations of one run are compared with each other"

FIXED: Mapping[str, tuple[str, ...]] = {
    "the run's keys in Redis and its metrics carry it": ("name",),
    "every policy version descends from it": ("model",),
    "the progress of the run is a position in this order of prompts": (
        *("seed", "data.source", "data.domain_field", "data.held_out_ratio", "data.shuffle"),
    ),
    f"it defines a rollout, and {_NOT_COMPARABLE}": (
        *("rollout.program", "rollout.agent.contexts", "rollout.environment", "rollout.environment_options"),
        "data.chat_template_kwargs",
        *("rollout.max_turns", "rollout.max_new_tokens", "rollout.temperature"),
        *("curriculum.token_budget", "curriculum.token_budget_options"),
        *("curriculum.turn_budget", "curriculum.turn_budget_options"),
        *("curriculum.planner", "curriculum.planner_options", "curriculum.most_members"),
        "generator.engine",
    ),
    f"it defines the score of an answer, and {_NOT_COMPARABLE}": (
        *("reward.verifier", "reward.options", "reward.on_timeout", "reward.on_error", "reward.fixed_value"),
        "reward.answer_after",
        *("reward.overlong_buffer_tokens", "curriculum.group_shaper", "curriculum.group_shaper_options"),
    ),
    "evaluations of one run are compared with each other": (
        *("data.evaluation_source", "evaluation.prompt_count", "evaluation.samples_per_prompt"),
        *("evaluation.temperature", "evaluation.top_p", "evaluation.top_k", "evaluation.seed"),
    ),
    "the queue applies it to every group and batch of the run": (
        *("schedule.preset", "schedule.groups_per_batch", "schedule.group_size", "schedule.max_staleness"),
        "schedule.harvest",
        *("schedule.window_groups", "schedule.wave_batches", "schedule.spare_groups", "schedule.spare_members"),
        *("schedule.on_stale", "schedule.filter_zero_variance", "rollout.max_attempts", "store.session_ttl_seconds"),
        *("schedule.start_order", "schedule.resume_order"),
    ),
    "it defines a train step, and steps replayed after a crash must be identical": (
        *("trainer.lr_schedule", "trainer.warmup_steps", "trainer.weight_decay", "trainer.betas"),
        "trainer.optimizer",
        *("trainer.max_grad_norm", "trainer.minibatches"),
        *("trainer.algorithm.advantage", "trainer.algorithm.loss", "trainer.algorithm.old_logprobs"),
        *("trainer.algorithm.update_scale", "trainer.algorithm.update_scale_options"),
        "trainer.algorithm.skip_zero_advantage",
        *("trainer.algorithm.advantage_options", "trainer.algorithm.loss_options", "trainer.algorithm.masks"),
        *("trainer.algorithm.clip_low", "trainer.algorithm.clip_high", "trainer.algorithm.dual_clip"),
        *("trainer.algorithm.tis_cap", "trainer.algorithm.aggregation", "trainer.algorithm.kl_coefficient"),
        *("trainer.algorithm.old_logprobs_options", "trainer.replay"),
    ),
    "it contains the states and batch files of the run": ("checkpoints.folder",),
}
"""Fixed fields and sections by reason."""

_RESOLVED = (
    "harvest",
    "max_staleness",
    "window_groups",
    "wave_batches",
    "spare_groups",
    "spare_members",
    "on_stale",
    "start_order",
)
"""Fields of the schedule section of which null is the value of the preset."""
_REASONS = {name: reason for reason, names in FIXED.items() for name in names}


def reason_to_keep(field: str) -> str | None:
    """Return the reason why a field (``section.field`` or deeper) is fixed; None when it may change."""
    parts = field.split(".")
    names = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
    return next((_REASONS[name] for name in names if name in _REASONS), None)


def refused_changes(before: RunConfig, now: RunConfig) -> dict[str, str]:
    """Return the changed fixed settings with their reasons; empty when the run may be continued.

    A recorded schedule that this version refuses has no numbers to compare: then its fields count as they were written.
    Raises ConfigError for an impossible schedule of ``now``.
    """
    new = _with_resolved_schedule(now)
    if schedule_problem(before) is None:
        old = _with_resolved_schedule(before)
    else:
        old, new = before.model_dump(mode="json"), now.model_dump(mode="json")
    found = {name: reason_to_keep(name) for name in sorted(differences(old, new))}
    if now.trainer.train_steps < before.trainer.train_steps:
        found["trainer.train_steps"] = f"it may only grow, and was {before.trainer.train_steps}"
    return {name: reason for name, reason in found.items() if reason is not None}


def schedule_problem(run: RunConfig) -> str | None:
    """Return the rule that the schedule of a run file breaks; None for a possible schedule."""
    try:
        Schedule.from_config(run)
    except ConfigError as error:
        return str(error)
    return None


def _with_resolved_schedule(run: RunConfig) -> dict[str, Any]:
    """Return the fields of a run file with the numbers of its preset: to write one of them out is no change."""
    values, schedule = run.model_dump(mode="json"), asdict(Schedule.from_config(run))
    values["schedule"] |= {name: schedule[name] for name in values["schedule"] if name in _RESOLVED}
    return values


def differences(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> set[str]:
    """Return the dotted names of the fields with other values."""
    names: set[str] = set()
    for key in before.keys() | now.keys():
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            names |= differences(old, new, f"{prefix}{key}.")
        elif old != new:
            names.add(f"{prefix}{key}")
    return names
