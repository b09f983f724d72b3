"""Named schedules from the literature: one row of numbers and switches each; ``rollmesh config schedules`` prints them.

B = groups_per_batch, n = group_size (1 with harvest trajectory). The window is (max_staleness + 1) * B unless the row
or the run file sets window_groups. All that documents and the chart say about a preset is generated from its row.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rollmesh.config.yaml_text import parse_yaml
from rollmesh.scheduling.axes import AdmissionRule, CutOrder, Harvest, OnStale, StartOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """One named schedule before the overrides of the run file."""

    source: str
    """Paper or code that defines the schedule."""
    deviation: str = ""
    """Difference between the schedule and its source."""
    use: str
    """Work that it suits."""
    cost: str
    """What it costs there."""
    goes_with: str = ""
    """Settings of other sections: those of the source, or those that ``deviation`` names."""
    harvest: Harvest = Harvest.GROUP
    admission: AdmissionRule
    wave_batches: int = 1
    spare_batches: float = 0.0
    """Default spare_groups in batches, rounded up."""
    spare_member_share: float = 0.0
    """Default spare_members as a share of group_size, rounded up."""
    window_batches: float | None = None
    """Default window_groups in batches, rounded up; None for max_staleness + 1."""
    parts: int = 0
    """Default number of parts of a batch; with a batch that it does not divide, their greatest common divisor."""
    max_staleness: int
    fixed_staleness: bool = False
    """True if another max_staleness would be another schedule."""
    staleness_follows_window: bool = False
    """True if the source sets the lag in groups: then max_staleness is ceil(window_groups / B) - 1 by default."""
    pool_batches: float | None
    """Default pool_size in batches, rounded up to whole groups; None for the whole window."""
    auto_pool: bool = False
    """True if the pool is automatic by default, where trajectories do not rest."""
    barrier: bool = False
    on_stale: OnStale = OnStale.PACE
    segments: int = 0
    """Default segment_tokens as a share of rollout.max_new_tokens: one over this number; 0 for no rest."""
    start_order: StartOrder = StartOrder.ADMISSION
    cut_order: CutOrder = CutOrder.ADMISSION


PRESETS = {
    "sync": Preset(
        source="GRPO and PPO as usual: generate, wait, train",
        deviation="none",
        use="The reference for every comparison: each token is on-policy. Use it to check a loss, a verifier or a "
        "reward before any schedule is blamed.",
        cost="Generators wait for the trainer, and the trainer waits for the longest answer of every batch.",
        admission=AdmissionRule.WAVE,
        max_staleness=0,
        fixed_staleness=True,
        pool_batches=1,
    ),
    "one_step_off": Preset(
        source="asynchronous RLHF (arXiv 2410.18252): batch s+1 is generated while the trainer works on batch s",
        deviation="generators load a version in the middle of a batch, so an answer may have tokens of two versions",
        use="Short answers of similar lengths, with about as much time for an update as for a batch.",
        cost="Every batch after the first is one step old. The longest answer of a batch still blocks it.",
        admission=AdmissionRule.WAVE,
        max_staleness=1,
        fixed_staleness=True,
        pool_batches=1,
    ),
    "copris": Preset(
        source="CoPRIS (arXiv 2511.05589)",
        deviation="no stages: generation continues during the update; the pool follows the pace of the trainer and the "
        "caches, in the paper its size is fixed; the paper bounds no staleness",
        use="The default: long and uneven answers, generators that come and go, and a correction by importance "
        "sampling.",
        cost="Generators that are faster than the trainer idle. With a number as pool_size they fill the window "
        "instead, and staleness rises to its bound.",
        admission=AdmissionRule.POOL,
        max_staleness=4,
        pool_batches=1.5,
        auto_pool=True,
    ),
    "copris_paper": Preset(
        source="CoPRIS (arXiv 2511.05589): 1024 requests in flight for 64 * 8 samples a step; stages alternate",
        deviation="the paper bounds neither the stages of a trajectory nor its staleness",
        use="Results that are compared with the paper's, or generators and trainer on the same devices, one after the "
        "other.",
        cost="Nothing is generated during an update, and every unfinished answer is pre-filled again after it.",
        goes_with="trainer.algorithm.old_logprobs: stage_end",
        admission=AdmissionRule.POOL,
        max_staleness=8,
        pool_batches=2,
        barrier=True,
    ),
    "april": Preset(
        source="APRIL (arXiv 2509.18521): 64 prompts in flight for batches of 32, at most 5 versions a trajectory",
        deviation="a filtered group is replaced at once, in the source when fewer than B are in flight; a group that "
        "would exceed 5 steps, so 6 versions, blocks the cut, in the source it may become older; the denominator of "
        "the ratio is the sampler's log-probability, in the source that of the current policy, which corrects nothing: "
        "on the demo 5 to 10 points less",
        use="Generators and trainer on the same devices, with a long tail: twice the prompts start, and a batch takes "
        "the first complete ones.",
        cost="Long answers are completed over several policies, so they are the off-policy ones, which the importance "
        "ratio corrects: on the demo it learned as `copris` did. The source's code has truncated importance sampling "
        "as an option: `loss: tis` with `old_logprobs: current`.",
        goes_with="trainer.algorithm.old_logprobs: sampler",
        admission=AdmissionRule.WAVE,
        spare_batches=1,
        max_staleness=5,
        pool_batches=2,
        barrier=True,
    ),
    "sorted": Preset(
        source="SortedRL (arXiv 2603.23414), on-policy: prompts are loaded a wave at a time, and an update takes the "
        "first finished answers, the shortest first; the others begin again",
        deviation="a finished answer that misses its batch begins again too, because it is off-policy. The last batch "
        "of a wave waits for its longest answers with idle slots: more prompts would leave the longest untrained",
        use="On-policy training with uneven lengths, where answers are short enough to begin again, and the advantage "
        "needs no group.",
        cost="Tokens of restarted answers are lost. A batch has answers of similar lengths, so lengths differ from "
        "batch to batch within a wave.",
        goes_with="trainer.algorithm.advantage: reinforce_pp",
        harvest=Harvest.TRAJECTORY,
        admission=AdmissionRule.WAVE,
        wave_batches=4,
        window_batches=4,
        max_staleness=0,
        fixed_staleness=True,
        pool_batches=4,
        barrier=True,
        on_stale=OnStale.RESTART,
        cut_order=CutOrder.SHORTEST,
    ),
    "sorted_partial": Preset(
        source="SortedRL (arXiv 2603.23414), partial: as sorted, but unfinished answers keep their tokens, and more "
        "prompts than the wave needs keep the slots full",
        deviation="the log-probabilities of all versions of an answer enter the ratio as they were sampled, at most "
        "max_staleness steps old; the paper bounds no staleness. That bound, and not the end of the wave, is what "
        "makes long answers train",
        use="As sorted, with answers too long to begin again.",
        cost="The long answers of a wave are trained last, and off-policy.",
        goes_with="trainer.algorithm.advantage: reinforce_pp",
        harvest=Harvest.TRAJECTORY,
        admission=AdmissionRule.WAVE,
        wave_batches=4,
        spare_batches=1,
        max_staleness=4,
        pool_batches=4,
        barrier=True,
        cut_order=CutOrder.SHORTEST,
    ),
    "areal": Preset(
        source="AReaL (arXiv 2505.24298): eta = 4 for code, 8 for maths; max_concurrent is one batch by default",
        deviation="the bound is also checked for every token of a batch; the source counts the started answers alone",
        use="A fixed number of requests in flight, with decoupled PPO, which tolerates more staleness.",
        cost="One more forward pass per batch for the log-probabilities. A group keeps its place until its longest "
        "answer ends.",
        goes_with="trainer.algorithm: {loss: decoupled_ppo, old_logprobs: recompute}",
        admission=AdmissionRule.CONCURRENCY,
        max_staleness=4,
        pool_batches=1,
    ),
    "pipeline": Preset(
        source="PipelineRL (arXiv 2509.19128): window_groups is groups_per_update + ceil(max_lag / attempts)",
        deviation="the lag is always bounded, by default to one batch; in the source max_lag is null by default, and "
        "the oldest samples leave a ring buffer",
        use="Generators that take new weights within an answer (keep_kv): the newest possible tokens at full "
        "occupancy.",
        cost="Tokens after a swap attend to a cache of older weights; no checkpoint reproduces them, so the audit does "
        "not score them again.",
        goes_with="generator.on_new_version: keep_kv",
        admission=AdmissionRule.POOL,
        max_staleness=1,
        staleness_follows_window=True,
        pool_batches=None,
    ),
    "roll": Preset(
        source="ROLL (arXiv 2512.22560): window_groups is B + ceil(B * alpha), max_staleness is ceil(alpha)",
        deviation="a batch takes the ready groups; the source waits for unfinished prompts of the older step. Age "
        "counts from the oldest token, in the source from the start of the prompt",
        use="A hard bound on the age of an answer, where throughput counts more than its longest answers.",
        cost="Answers that are too slow are dropped. This biases the lengths: watch the drops by length decile.",
        goes_with="trainer.algorithm.old_logprobs: recompute",
        admission=AdmissionRule.POOL,
        max_staleness=1,
        staleness_follows_window=True,
        pool_batches=None,
        on_stale=OnStale.EVICT,
        cut_order=CutOrder.OLDEST,
    ),
    "dart": Preset(
        source="DART (arXiv 2509.23866): each trajectory is scheduled on its own, generators reload one at a time",
        deviation="the dynamic number of rollouts of a task and the pool of stored successes are left out; "
        "staleness may be one step more than the window gives, so that generators need not all load at "
        "once",
        use="Agents and environments with waits: trajectories are independent, and generators reload one at a time.",
        cost="During a staggered reload some generators serve the older policy.",
        goes_with="generator.reload_at_once: 1, trainer.algorithm: {loss: tis, old_logprobs: recompute}",
        admission=AdmissionRule.POOL,
        # With the bound at the end of the window, a full window would make every generator load at once.
        max_staleness=2,
        window_batches=2,
        pool_batches=1.5,
    ),
    "rollpacker": Preset(
        source="RollPacker (arXiv 2509.21009): 1.25 times the prompts and the responses; late prompts wait for a long "
        "round",
        deviation="the planner of parallelism, the scheduler of rewards and training on idle rollout devices are left "
        "out",
        use="On-policy training with a long tail: short rounds with a quarter more prompts and answers, and a long "
        "round for the late ones now and then.",
        cost="The surplus and the answers that are set aside lose their tokens. Long prompts come late: watch the "
        "drops and the surplus by length decile.",
        admission=AdmissionRule.WAVE,
        spare_batches=0.25,
        spare_member_share=0.25,
        window_batches=1.25,
        max_staleness=0,
        fixed_staleness=True,
        pool_batches=1.25,
        barrier=True,
        on_stale=OnStale.SET_ASIDE,
    ),
    "ulorl": Preset(
        source="UloRL (arXiv 2507.19766): a budget of 8 segments, one segment a step; finished groups train, the "
        "others continue",
        deviation="the mask of well-mastered tokens is off unless trainer.algorithm.masks has it (mastered). When "
        "every trajectory rests and no batch is complete, all continue under the same policy; the number "
        "of unfinished groups and their age are bounded",
        use="Very long answers: each is generated in segments, and finished answers do not wait for the others.",
        cost="A long answer is written by several policies, one per segment.",
        goes_with="trainer.algorithm.old_logprobs: current, schedule.filter_zero_variance: true",
        admission=AdmissionRule.WAVE,
        spare_batches=1,
        max_staleness=7,
        pool_batches=2,
        barrier=True,
        segments=8,
    ),
    "kimi": Preset(
        source="Kimi k1.5 (arXiv 2501.12599), partial rollouts: a budget of tokens per iteration; only the segment of "
        "the current iteration is in the loss",
        deviation="the loss is that of the run file: loss: kimi is the squared log-ratio of the source. The "
        "optimizer keeps its state, and the budget counts per trajectory and iteration: a quarter of the "
        "longest answer; the source does not say how many prompts are open at once. A group trains when "
        "its last answer ends, so answers that ended under an older policy are masked whole. Detection "
        "of repetitions and prioritized sampling of prompts are left out",
        use="Very long answers with a budget of tokens per iteration and answer.",
        cost="A long answer needs several iterations, and its early segments are off-policy.",
        goes_with="trainer.algorithm: {advantage: dr_grpo}",
        admission=AdmissionRule.WAVE,
        spare_batches=1,
        window_batches=2,
        max_staleness=0,
        fixed_staleness=True,
        pool_batches=2,
        barrier=True,
        on_stale=OnStale.MASK_OLD_SEGMENTS,
        segments=4,
    ),
    "streamrl": Preset(
        source="StreamRL (arXiv 2504.15930): one step of overlap, the trainer streams, expected long answers start "
        "first",
        deviation="lengths are expected from the prompt history instead of a trained ranker; the enumeration of "
        "instances is left out: longest first is within 4/3 of the best makespan",
        use="A trainer apart from the generators, whose update takes long: it works on ready groups while the batch "
        "completes.",
        cost="One step of staleness. Longest first needs prompts that come again; without them the order is admission.",
        admission=AdmissionRule.WAVE,
        parts=8,
        max_staleness=1,
        fixed_staleness=True,
        pool_batches=1,
        start_order=StartOrder.LONGEST_EXPECTED,
    ),
    "flexmarl": Preset(
        source="FlexMARL (arXiv 2602.09578): gradients of micro-batches of 16 of 64 samples, one optimizer step",
        deviation="the movement of instances between agents is left out",
        use="On-policy training where the update takes long beside the generation: gradients are computed while the "
        "batch completes.",
        cost="The trainer makes several small passes; the last part still waits for the longest answer.",
        admission=AdmissionRule.WAVE,
        parts=4,
        max_staleness=0,
        fixed_staleness=True,
        pool_batches=1,
    ),
}


def companion_settings(preset: Preset) -> list[str]:
    """Return the settings that go with a preset, as ``a.b=c`` overrides of a run file."""
    return [f"{field}={json.dumps(value)}" for field, value in companion_fields(preset)]


def companion_fields(preset: Preset) -> Iterator[tuple[str, Any]]:
    """Yield the dotted fields of the run file that go with a preset, with their values."""
    return _leaves(parse_yaml(f"{{{preset.goes_with}}}"))


def _leaves(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
