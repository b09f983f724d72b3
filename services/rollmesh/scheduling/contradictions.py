"""Settings of a run file that contradict its schedule."""

from __future__ import annotations

from collections.abc import Iterator

from rollmesh.config import RunConfig
from rollmesh.config.old_logprob_methods import replayed_count
from rollmesh.scheduling.axes import AdmissionRule, CutOrder, Harvest, OnStale
from rollmesh.scheduling.curriculum_contradictions import curriculum_contradictions
from rollmesh.scheduling.presets import PRESETS
from rollmesh.scheduling.schedule_bounds import Bounds


def contradictions(
    config: RunConfig, bounds: Bounds, on_stale: OnStale, cut_order: CutOrder, harvest: Harvest
) -> Iterator[str]:
    """Yield one sentence per contradiction, with field, value and remedy."""
    section, preset = config.schedule, PRESETS[config.schedule.preset]
    if config.trainer.algorithm.old_logprobs == "stage_end" and not preset.barrier:
        yield (
            f"trainer.algorithm.old_logprobs=stage_end needs a barrier, which schedule.preset={section.preset} "
            f"does not have; take {' or '.join(n for n, p in PRESETS.items() if p.barrier)}, or another source"
        )
    every = config.generator.reload_every_versions
    if every > (1 if preset.barrier else bounds.max_staleness + 1):
        why = "its barrier" if preset.barrier else f"max_staleness={bounds.max_staleness}"
        remedy = "" if preset.barrier or preset.fixed_staleness else " or raise max_staleness"
        yield (
            f"generator.reload_every_versions={every}: schedule.preset={section.preset} with {why} lets no trajectory "
            f"start on versions that old, so it would have no effect; lower it{remedy}"
        )
    yield from _of_replay(config, bounds)
    if on_stale in (OnStale.RESTART, OnStale.SET_ASIDE) and not (
        preset.barrier and preset.admission is AdmissionRule.WAVE
    ):
        yield (
            f"schedule.on_stale={on_stale} with schedule.preset={section.preset}: groups that begin again need waves "
            "and a barrier, or they could begin again for ever; set on_stale to pace, mask_old_segments or evict, or "
            "take a preset with both (rollpacker, sorted)"
        )
    if on_stale is OnStale.SET_ASIDE and bounds.max_staleness > 0:
        yield (
            f"schedule.on_stale=set_aside with max_staleness={bounds.max_staleness}: partial groups within the bound "
            "stay open, so no long round would ever begin; set max_staleness=0 or another on_stale"
        )
    if on_stale is OnStale.RESTART and bounds.spare_groups:
        yield (
            f"schedule.on_stale=restart with spare_groups={bounds.spare_groups}: the wave would never wait for its "
            "slowest groups, which would begin again until the end of the run; set spare_groups=0 or on_stale=set_aside"
        )
    if cut_order is CutOrder.SHORTEST and on_stale is OnStale.MASK_OLD_SEGMENTS:
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
    if bounds.spare_members and config.rollout.program == "agent":
        yield (
            f"schedule.spare_members={bounds.spare_members}: with rollout.program=agent the mesh cannot cut off a "
            "session of an outside agent; set 0"
        )
    yield from _of_segments(config)
    yield from _of_groups_of_one(config, bounds, harvest)
    yield from _of_parts(config, bounds)
    yield from curriculum_contradictions(config, bounds, harvest)


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


def _of_groups_of_one(config: RunConfig, bounds: Bounds, harvest: Harvest) -> Iterator[str]:
    """Yield the contradictions of settings that compare the members of a group with groups of one trajectory."""
    section, advantage = config.schedule, config.trainer.algorithm.advantage
    if bounds.group_size > 1:
        return
    if harvest is Harvest.TRAJECTORY:
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
    if harvest is Harvest.TRAJECTORY and config.rollout.program == "agent":
        yield (
            f"{field} with rollout.program=agent: the sessions of outside agents on one prompt are one group; set "
            f"{remedy}"
        )


def _of_parts(config: RunConfig, bounds: Bounds) -> Iterator[str]:
    """Yield the contradictions of schedule.part_groups; without parts there are none."""
    section, parts, minibatches = config.schedule, bounds.part_groups, config.trainer.minibatches
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
    one_batch = bounds.wave_batches == 1 and not bounds.spare_groups
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


def _of_replay(config: RunConfig, bounds: Bounds) -> Iterator[str]:
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
    if bounds.max_staleness == 0:
        remedy = "take another preset" if preset.fixed_staleness else "raise it"
        yield (
            f"trainer.replay with schedule.preset={section.preset} and max_staleness=0: every earlier group is over "
            f"the bound, so none would be replayed; {remedy}, or set trainer.replay=null"
        )
