"""Settings of a run file that contradict its schedule, and settings of the curriculum that contradict any."""

from collections.abc import Iterator

from rollmesh.config import RunConfig
from rollmesh.config.old_logprob_methods import replayed_count
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
from rollmesh.config.sampler_methods import ORDER
from rollmesh.scheduling.axes import AdmissionRule, CutOrder, Harvest, OnStale
from rollmesh.scheduling.presets import PRESETS
from rollmesh.scheduling.schedule_bounds import Bounds

MOST_MEMBERS = 2048
"""Most members of a group: its places in the queue's order are 4,096, replacements and forks included."""


def contradictions(config: RunConfig, schedule: Bounds) -> Iterator[str]:
    """Yield one sentence per contradiction, with field, value and remedy."""
    section, preset = config.schedule, PRESETS[config.schedule.preset]
    if config.trainer.algorithm.old_logprobs == "stage_end" and not preset.barrier:
        yield (
            f"trainer.algorithm.old_logprobs=stage_end needs a barrier, which schedule.preset={section.preset} "
            f"does not have; take {' or '.join(n for n, p in PRESETS.items() if p.barrier)}, or another source"
        )
    every = config.generator.reload_every_versions
    if every > (1 if preset.barrier else schedule.max_staleness + 1):
        why = "its barrier" if preset.barrier else f"max_staleness={schedule.max_staleness}"
        remedy = "" if preset.barrier or preset.fixed_staleness else " or raise max_staleness"
        yield (
            f"generator.reload_every_versions={every}: schedule.preset={section.preset} with {why} lets no trajectory "
            f"start on versions that old, so it would have no effect; lower it{remedy}"
        )
    yield from _of_replay(config, schedule)
    yield from _of_begin_again(config, schedule)
    if schedule.cut_order is CutOrder.SHORTEST and schedule.on_stale is OnStale.MASK_OLD_SEGMENTS:
        yield (
            "schedule.cut_order=shortest with schedule.on_stale=mask_old_segments: shorter groups could overtake a "
            "long one until the end of the run, because masked tokens have no deadline; set schedule.on_stale=pace or "
            "another cut_order"
        )
    if section.pool_size == "auto" and (preset.barrier or preset.admission is AdmissionRule.WAVE):
        able = [n for n, p in PRESETS.items() if not p.barrier and p.admission is not AdmissionRule.WAVE]
        yield (
            f"schedule.pool_size=auto: schedule.preset={section.preset} opens groups in waves or between barriers, so "
            f"the pace of the trainer cannot set its pool; set a number or null, or take {', '.join(able)}"
        )
    if schedule.spare_members and config.rollout.program == "agent":
        yield (
            f"schedule.spare_members={schedule.spare_members}: with rollout.program=agent the mesh cannot cut off a "
            "session of an outside agent; set 0"
        )
    yield from _of_segments(config)
    yield from _of_groups_of_one(config, schedule)
    yield from _of_parts(config, schedule)
    if config.curriculum.sampler != ORDER and schedule.harvest is Harvest.TRAJECTORY:
        yield (
            f"curriculum.sampler={config.curriculum.sampler} with schedule.harvest=trajectory (schedule.preset="
            f"{section.preset}): every prompt comes schedule.group_size times in a row, in the order of the source; "
            "set schedule.harvest=group or curriculum.sampler=order"
        )
    if config.curriculum.planner != "single":
        yield from _of_planner(config, schedule)
    elif config.curriculum.most_members is not None and config.trainer.algorithm.credit != "shared":
        yield (
            f"curriculum.most_members={config.curriculum.most_members} with curriculum.planner=single would have no "
            "effect: a group has one round; set null, or another planner"
        )
    if config.curriculum.group_shaper != "none":
        yield from _of_shaper(config, schedule)
    yield from _of_budgets(config)


def _of_begin_again(config: RunConfig, schedule: Bounds) -> Iterator[str]:
    """Yield the contradictions of an on_stale under which groups begin again."""
    section, preset = config.schedule, PRESETS[config.schedule.preset]
    if schedule.on_stale not in (OnStale.RESTART, OnStale.SET_ASIDE):
        return
    if not (preset.barrier and preset.admission is AdmissionRule.WAVE):
        able = sorted(n for n, p in PRESETS.items() if p.on_stale in (OnStale.RESTART, OnStale.SET_ASIDE))
        yield (
            f"schedule.on_stale={schedule.on_stale} with schedule.preset={section.preset}: groups that begin again "
            "need waves and a barrier, or they could begin again for ever; set on_stale to pace, mask_old_segments or "
            f"evict, or take a preset with both ({', '.join(able)})"
        )
    if schedule.on_stale is OnStale.SET_ASIDE and schedule.max_staleness > 0:
        yield (
            f"schedule.on_stale=set_aside with max_staleness={schedule.max_staleness}: partial groups within the "
            "bound stay open, so no long round would ever begin; set max_staleness=0 or another on_stale"
        )
    if schedule.on_stale is OnStale.RESTART and schedule.spare_groups:
        yield (
            f"schedule.on_stale=restart with spare_groups={schedule.spare_groups}: the wave would never wait for its "
            "slowest groups, which would begin again until the end of the run; set spare_groups=0 or on_stale=set_aside"
        )


def _of_segments(config: RunConfig) -> Iterator[str]:
    """Yield the contradictions of schedule.segment_tokens."""
    section, rollout = config.schedule, config.rollout
    tokens = section.segment_tokens
    if tokens and not rollout.partial_save_tokens <= tokens <= rollout.max_new_tokens:
        yield (
            f"schedule.segment_tokens={tokens}: a trajectory that rests is saved, and never rests after its budget; "
            f"set a value from rollout.partial_save_tokens={rollout.partial_save_tokens} to rollout.max_new_tokens="
            f"{rollout.max_new_tokens}, or 0"
        )
    if rollout.program == "agent" and (tokens or (tokens is None and PRESETS[section.preset].segments)):
        given = "null" if tokens is None else tokens
        yield (
            f"schedule.preset={section.preset} with schedule.segment_tokens={given} and rollout.program=agent: a "
            "session of an outside agent cannot rest; set schedule.segment_tokens=0"
        )
    if PRESETS[section.preset].barrier or not tokens:
        return
    if (every := config.generator.reload_every_versions) > 1:
        yield (
            f"schedule.segment_tokens={tokens} with generator.reload_every_versions={every}: a trajectory rests until "
            "a newer version is announced, and generators pass over the newer ones, so it would continue under the "
            "same version; set generator.reload_every_versions=1 or schedule.segment_tokens=0"
        )
    if section.pool_size == "auto":
        yield (
            f"schedule.pool_size=auto with schedule.segment_tokens={tokens}: the measured time to ready includes the "
            "rests, during which a trajectory takes no place in the pool, so the pool would be too large; set "
            "schedule.pool_size to a number or null, or schedule.segment_tokens=0"
        )


def _of_groups_of_one(config: RunConfig, schedule: Bounds) -> Iterator[str]:
    """Yield the contradictions of settings that compare the members of a group with groups of one trajectory."""
    section, advantage = config.schedule, config.trainer.algorithm.advantage
    if schedule.group_size > 1:
        return
    if schedule.harvest is Harvest.TRAJECTORY:
        field = f"schedule.harvest=trajectory (schedule.preset={section.preset})"
        remedy = "schedule.harvest=group"
    else:
        field, remedy = f"schedule.group_size={section.group_size}", "a larger schedule.group_size"
    compares = config.trainer.algorithm.advantage_method.compares
    if compares == "group":
        yield (
            f"trainer.algorithm.advantage={advantage} compares the members of a group, and with {field} a group has "
            f"one; set trainer.algorithm.advantage=reinforce_pp, or {remedy}"
        )
    if section.filter_zero_variance:
        yield (
            f"schedule.filter_zero_variance=true would drop every group: with {field} the rewards of a group are "
            f"always equal; set false, or {remedy}"
        )
    if section.groups_per_batch == 1 and compares == "batch":
        yield (
            f"schedule.groups_per_batch=1 with {field}: the advantages of a batch of one trajectory are 0; raise "
            "schedule.groups_per_batch"
        )
    if schedule.harvest is Harvest.TRAJECTORY and config.rollout.program == "agent":
        yield (
            f"{field} with rollout.program=agent: the sessions of outside agents on one prompt are one group; set "
            f"{remedy}"
        )


def _of_parts(config: RunConfig, schedule: Bounds) -> Iterator[str]:
    """Yield the contradictions of schedule.part_groups; without parts there are none."""
    section, parts, minibatches = config.schedule, schedule.part_groups, config.trainer.minibatches
    if not parts:
        return
    algorithm = config.trainer.algorithm
    advantage = algorithm.advantage_method
    if advantage.whole_batch or advantage.needs_policy or advantage.needs_reference:
        yield (
            f"schedule.part_groups={parts}: trainer.algorithm.advantage={algorithm.advantage} is known "
            "only for the whole batch; set an advantage that compares the members of a group (grpo), or part_groups=0"
        )
    if algorithm.masks:
        yield (
            f"schedule.part_groups={parts}: trainer.algorithm.masks are computed for the whole batch; set "
            "trainer.algorithm.masks=[] or part_groups=0"
        )
    one_batch = schedule.wave_batches == 1 and not schedule.spare_groups
    if PRESETS[section.preset].admission is not AdmissionRule.WAVE or not one_batch:
        waves = {n: p for n, p in PRESETS.items() if p.admission is AdmissionRule.WAVE and not p.spare_batches}
        able = [name for name, preset in waves.items() if preset.wave_batches == 1]
        yield (
            f"schedule.part_groups={parts}: schedule.preset={section.preset} may cut other groups than the first ready "
            f"ones; take a preset that opens one batch at a time ({', '.join(able)}) without spare groups, or set 0"
        )
    if section.groups_per_batch % parts:
        yield (
            f"schedule.part_groups={parts} does not divide schedule.groups_per_batch={section.groups_per_batch}; set a "
            "divisor of it, or 0"
        )
    if minibatches > 1:
        yield (
            f"schedule.part_groups={parts} accumulates one gradient at fixed weights, but trainer.minibatches="
            f"{minibatches} updates them within the batch; set trainer.minibatches=1 or part_groups=0"
        )
    if config.model.adapter is not None and config.model.adapter.dropout:
        yield (
            f"schedule.part_groups={parts} with model.adapter.dropout={config.model.adapter.dropout:g}: a replayed "
            "step has no parts, and would drop other inputs; set model.adapter.dropout=0 or part_groups=0"
        )
    if config.checkpoints.state_every_steps > 1:
        yield (
            f"schedule.part_groups={parts} with checkpoints.state_every_steps={config.checkpoints.state_every_steps}: "
            "a replayed step has no parts, and its rounding differs from that of the published policy; set "
            "checkpoints.state_every_steps=1 or part_groups=0"
        )


def _of_replay(config: RunConfig, schedule: Bounds) -> Iterator[str]:
    section, replay = config.schedule, config.trainer.replay
    preset = PRESETS[section.preset]
    if replay is None:
        return
    if replayed_count(section.groups_per_batch, replay.share) == 0:
        smallest = (1000 // (2 * section.groups_per_batch + 1) + 1) / 1000
        yield (
            f"trainer.replay.share={replay.share} of a batch with schedule.groups_per_batch="
            f"{section.groups_per_batch} fresh groups rounds to no group; set a share from {smallest}, or "
            "trainer.replay=null"
        )
    if schedule.max_staleness == 0:
        remedy = "take another preset" if preset.fixed_staleness else "raise it"
        yield (
            f"trainer.replay with schedule.preset={section.preset} and max_staleness=0: every earlier group is over "
            f"the bound, so none would be replayed; {remedy}, or set trainer.replay=null"
        )


def _of_planner(config: RunConfig, schedule: Bounds) -> Iterator[str]:
    section, algorithm = config.curriculum, config.trainer.algorithm
    planner = f"curriculum.planner={section.planner}"
    if schedule.harvest is Harvest.TRAJECTORY:
        yield (
            f"{planner} with schedule.harvest=trajectory (schedule.preset={config.schedule.preset}): every trajectory "
            "is a group, so there is nothing to plan; set schedule.harvest=group or curriculum.planner=single"
        )
    if schedule.spare_members:
        yield (
            f"schedule.spare_members={schedule.spare_members} with {planner}: the planner alone decides how many "
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
    yield from _of_sizes(config, schedule)


def _of_sizes(config: RunConfig, schedule: Bounds) -> Iterator[str]:
    """Yield the contradictions between the members that a planner launches and the bound on them."""
    section, method = config.curriculum, PLANNERS[config.curriculum.planner]
    size, most = schedule.group_size, section.most_members
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


def _of_shaper(config: RunConfig, schedule: Bounds) -> Iterator[str]:
    section, advantage = config.curriculum, config.trainer.algorithm.advantage
    shaper = f"curriculum.group_shaper={section.group_shaper}"
    if schedule.harvest is Harvest.TRAJECTORY:
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
        count = schedule.group_size if section.planner == "dars" else section.largest_group(schedule.group_size)
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
