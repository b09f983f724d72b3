"""Settings of the curriculum that contradict each other, the schedule, or another section."""

from __future__ import annotations

from collections.abc import Iterator

from rollmesh.config import RunConfig
from rollmesh.config.round_methods import (
    PLANNERS,
    DapOptions,
    DarsOptions,
    DotOptions,
    QuorumOptions,
    largest_budget,
    largest_z_score,
    planned_members,
)
from rollmesh.scheduling.axes import Harvest
from rollmesh.scheduling.schedule_bounds import Bounds

MOST_MEMBERS = 2048
"""Most members of a group: its places in the queue's order are 4,096, replacements and forks included."""


def curriculum_contradictions(config: RunConfig, bounds: Bounds, harvest: Harvest) -> Iterator[str]:
    """Yield one sentence per contradiction, with field, value and remedy."""
    if config.curriculum.planner != "single":
        yield from _of_planner(config, bounds, harvest)
    elif config.curriculum.most_members is not None:
        yield (
            f"curriculum.most_members={config.curriculum.most_members} with curriculum.planner=single would have no "
            "effect: a group has one round; set null, or another planner"
        )
    if config.curriculum.group_shaper != "none":
        yield from _of_shaper(config, bounds, harvest)
    yield from _of_budgets(config)


def _of_planner(config: RunConfig, bounds: Bounds, harvest: Harvest) -> Iterator[str]:
    section, algorithm = config.curriculum, config.trainer.algorithm
    planner = f"curriculum.planner={section.planner}"
    if harvest is Harvest.TRAJECTORY:
        yield (
            f"{planner} with schedule.harvest=trajectory (schedule.preset={config.schedule.preset}): every trajectory "
            "is a group, so there is nothing to plan; set schedule.harvest=group or curriculum.planner=single"
        )
    if bounds.spare_members:
        yield (
            f"schedule.spare_members={bounds.spare_members} with {planner}: the planner alone decides how many "
            "rollouts a group gets; set schedule.spare_members=0 or curriculum.planner=single"
        )
    if config.rollout.program == "agent":
        yield (
            f"{planner} with rollout.program=agent: outside agents open the sessions of a group, so no planner can "
            "launch them; set curriculum.planner=single"
        )
    advantage, norm = algorithm.advantage_method, algorithm.advantage_options.get("norm")
    if PLANNERS[section.planner].adaptive and advantage.group_spread and norm is None:
        yield (
            f"trainer.algorithm.advantage={algorithm.advantage} with {planner}: the size of a group depends on its "
            "rewards, and dividing by their spread would weigh hard prompts unnoticed; set "
            "trainer.algorithm.advantage=dr_grpo, or grpo with advantage_options.norm=none or group_std"
        )
    yield from _of_sizes(config, bounds)


def _of_sizes(config: RunConfig, bounds: Bounds) -> Iterator[str]:
    """Yield the contradictions between the members that a planner launches and the bound on them."""
    section, method = config.curriculum, PLANNERS[config.curriculum.planner]
    size, most = bounds.group_size, section.most_members
    known = section.planner in PLANNERS.methods
    least = planned_members(section.planner, section.planner_options, size)[1] if known else size
    if most is not None and most < least:
        yield (
            f"curriculum.most_members={most} with curriculum.planner={section.planner}, which launches up to {least} "
            f"members of a group with schedule.group_size={size}; set curriculum.most_members={least} or null, or "
            "another curriculum.planner"
        )
    if (largest := section.largest_group(size)) > MOST_MEMBERS:
        yield (
            f"curriculum.planner={section.planner} with schedule.group_size={size}: a group would have up to {largest} "
            f"members, above {MOST_MEMBERS}; set curriculum.most_members, lower its options, or schedule.group_size"
        )
    options = method.options.model_validate(section.planner_options) if known else None
    if isinstance(options, QuorumOptions) and options.needed(size) < min(2, size):
        yield (
            f"curriculum.planner_options.share={options.share:g} with schedule.group_size={size} completes a group "
            "with one scored member, which has nothing to compare it with; raise share"
        )
    if isinstance(options, DarsOptions) and options.largest_group <= size:
        yield (
            f"curriculum.planner_options.most_members={options.largest_group} with schedule.group_size={size} leaves "
            "no room for a second round; raise most_members, or lower schedule.group_size"
        )


def _of_shaper(config: RunConfig, bounds: Bounds, harvest: Harvest) -> Iterator[str]:
    section, advantage = config.curriculum, config.trainer.algorithm.advantage
    shaper = f"curriculum.group_shaper={section.group_shaper}"
    if harvest is Harvest.TRAJECTORY:
        yield (
            f"{shaper} with schedule.harvest=trajectory (schedule.preset={config.schedule.preset}): every trajectory "
            "is a group, so there is nothing to compare; set schedule.harvest=group or curriculum.group_shaper=none"
        )
    if config.trainer.algorithm.advantage_method.ignores_shaping:
        yield (
            f"{shaper} with trainer.algorithm.advantage={advantage}: {advantage} reads which answers are right and "
            "would ignore the shaped rewards; set curriculum.group_shaper=none or another advantage"
        )
    if section.group_shaper == "dap":
        yield from _of_dap(config)
    if section.group_shaper == "dot":
        if config.trainer.algorithm.old_logprobs == "stage_end":
            yield (
                f"trainer.algorithm.old_logprobs=stage_end with {shaper}: the log-probabilities of a stage belong to "
                "all tokens that were recorded, and those of an answer that dot cuts would be dropped; set "
                "trainer.algorithm.old_logprobs=sampler or curriculum.group_shaper=none"
            )
        # A second round of dars goes to groups with wrong answers, which dot leaves as they are.
        count = bounds.group_size if section.planner == "dars" else section.largest_group(bounds.group_size)
        alpha, largest = DotOptions.model_validate(section.group_shaper_options).alpha, largest_z_score(count)
        if alpha >= largest:
            yield (
                f"curriculum.group_shaper_options.alpha={alpha:g} with groups of at most {count}: no length of so few "
                f"is {largest:.3f} or more standard deviations above their mean, so dot would never truncate; set "
                f"alpha={0.9 * largest:.2f} or less, or a larger schedule.group_size"
            )


def _of_dap(config: RunConfig) -> Iterator[str]:
    section, longest = config.curriculum, config.rollout.max_new_tokens
    options = DapOptions.model_validate(section.group_shaper_options)
    if options.longest_tokens != longest:
        yield (
            f"curriculum.group_shaper_options.longest_tokens={options.longest_tokens} is not rollout.max_new_tokens="
            f"{longest}, at which the penalty is largest; set longest_tokens={longest}"
        )
    if config.reward.overlong_buffer_tokens:
        yield (
            f"reward.overlong_buffer_tokens={config.reward.overlong_buffer_tokens} with curriculum.group_shaper=dap "
            "would add the penalty on long answers twice; set reward.overlong_buffer_tokens=0"
        )
    if section.token_budget != "constant":
        yield (
            f"curriculum.token_budget={section.token_budget} with curriculum.group_shaper=dap: the penalty is relative "
            "to longest_tokens, so answers cut off at a smaller budget would have none; set curriculum.token_budget="
            "constant, or curriculum.group_shaper=none and reward.overlong_buffer_tokens, which follows the budget"
        )


def _of_budgets(config: RunConfig) -> Iterator[str]:
    section, rollout = config.curriculum, config.rollout
    if section.token_budget != "constant" and rollout.program == "agent":
        yield (
            f"curriculum.token_budget={section.token_budget} with rollout.program=agent: the length of a session is "
            "rollout.max_new_tokens for all its calls; set curriculum.token_budget=constant"
        )
    if section.turn_budget != "constant" and rollout.program != "environment":
        yield (
            f"curriculum.turn_budget={section.turn_budget} with rollout.program={rollout.program}, which has no turns; "
            "set curriculum.turn_budget=constant or rollout.program=environment"
        )
    limits = (("token_budget", "max_new_tokens"), ("turn_budget", "max_turns"))
    for field, limit in limits:
        found = largest_budget(getattr(section, field), getattr(section, f"{field}_options"))
        if found is not None and found[1] > (most := getattr(rollout, limit)):
            yield (
                f"curriculum.{field}_options.{found[0]}: a budget of {found[1]} is above rollout.{limit}={most}; lower "
                f"it, or set rollout.{limit}={found[1]}"
            )
