"""Settings that are fixed for a whole run, with the reasons; all others may change when the run is continued.

The data of the run depends on the fixed settings: after a change, the data written before and after it would not be
comparable. ``rollmesh up`` compares them with those in the run folder, and the queue those of the schedule.
"""

from collections.abc import Mapping

_NOT_COMPARABLE = "rewards and evaluations of one run are compared with each other"

FIXED: Mapping[str, str] = {
    "the run's keys in Redis and its metrics carry it": "name",
    "every policy version descends from it": "model",
    "the progress of the run is a position in this order of prompts": (
        "seed data.source data.domain_field data.held_out_ratio data.shuffle"
    ),
    f"it defines a rollout, and {_NOT_COMPARABLE}": (
        "rollout.program rollout.agent.contexts rollout.agent.function rollout.environment rollout.environment_options "
        "data.chat_template_kwargs rollout.max_turns rollout.max_new_tokens rollout.temperature "
        "rollout.top_p rollout.top_k rollout.min_p curriculum.token_budget curriculum.token_budget_options "
        "curriculum.turn_budget curriculum.turn_budget_options curriculum.planner curriculum.planner_options "
        "curriculum.most_members "
        "generator.engine"
    ),
    f"it defines the score of an answer, and {_NOT_COMPARABLE}": (
        "reward.verifier reward.options reward.on_timeout reward.on_error reward.fixed_value reward.answer_after "
        "reward.overlong_buffer_tokens curriculum.group_shaper curriculum.group_shaper_options teachers"
    ),
    "evaluations of one run are compared with each other": (
        "data.evaluation_source evaluation.prompt_count evaluation.samples_per_prompt evaluation.temperature "
        "evaluation.top_p evaluation.top_k evaluation.seed"
    ),
    "the queue applies it to every group and batch of the run": (
        "schedule.preset schedule.groups_per_batch schedule.group_size schedule.max_staleness schedule.harvest "
        "schedule.window_groups schedule.wave_batches schedule.spare_groups schedule.spare_members "
        "schedule.on_stale schedule.filter_zero_variance rollout.max_attempts store.session_ttl_seconds "
        "schedule.start_order schedule.resume_order"
    ),
    "it defines a train step, and steps replayed after a crash must be identical": (
        "trainer.lr_schedule trainer.warmup_steps trainer.weight_decay trainer.betas trainer.optimizer "
        "trainer.max_grad_norm trainer.minibatches trainer.algorithm.credit trainer.algorithm.teacher "
        "trainer.algorithm.advantage trainer.algorithm.loss "
        "trainer.algorithm.old_logprobs trainer.algorithm.update_scale trainer.algorithm.update_scale_options "
        "trainer.algorithm.skip_zero_advantage trainer.algorithm.advantage_options trainer.algorithm.loss_options "
        "trainer.algorithm.masks trainer.algorithm.clip_low trainer.algorithm.clip_high "
        "trainer.algorithm.dual_clip trainer.algorithm.tis_cap trainer.algorithm.aggregation "
        "trainer.algorithm.kl_coefficient trainer.algorithm.kl_reference trainer.algorithm.old_logprobs_options "
        "trainer.replay"
    ),
    "it contains the states and batch files of the run": "checkpoints.folder",
}
"""Fixed fields and sections by reason, with spaces between them; a section includes all of its fields."""
_OF_TEACHER_SERVICES = frozenset(
    ["address", "device", "replicas", "tokens_per_microbatch", "timeout_seconds", "sglang"]
)
"""Settings of a teacher that may change: they say where and how its services compute, not what."""
_REASONS = {name: reason for reason, names in FIXED.items() for name in names.split()}


def reason_to_keep(field: str) -> str | None:
    """Return the reason why a field (``section.field`` or deeper) is fixed; None when it may change."""
    parts = field.split(".")
    if parts[0] == "teachers" and len(parts) > 2 and parts[2] in _OF_TEACHER_SERVICES:
        return None
    names = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
    return next((_REASONS[name] for name in names if name in _REASONS), None)


def fixed_fields(section: str) -> list[str]:
    """Return the fixed fields of a section, by their names inside of it."""
    return [name.removeprefix(f"{section}.") for name in _REASONS if name.startswith(f"{section}.")]
