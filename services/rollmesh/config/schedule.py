"""Schedule section: admission, cut, and the effect of a new policy version on work in flight."""

from typing import Annotated, Literal

from pydantic import Field

from rollmesh.config.section import Section, one_error

PoolSize = Annotated[
    Annotated[int, Field(ge=1)] | Literal["auto"] | None,
    one_error("a whole number of trajectories from 1 on, auto or null"),
]


class ScheduleConfig(Section):
    """A preset with overrides; ``Schedule.from_config`` resolves the nulls."""

    preset: Literal[
        "sync",
        "one_step_off",
        "copris",
        "copris_paper",
        "april",
        "sorted",
        "sorted_partial",
        "areal",
        "pipeline",
        "roll",
        "dart",
        "rollpacker",
        "ulorl",
        "kimi",
        "streamrl",
        "flexmarl",
    ] = "copris"
    """Named schedule of the literature; docs/schedules.md and ``rollmesh config schedules`` have their numbers."""
    groups_per_batch: int = Field(default=16, ge=1, le=2048)
    """B: groups that one train step consumes; trajectories with harvest trajectory."""
    group_size: int = Field(default=8, ge=1, le=1024)
    """n: trajectories of a prompt. They are a group, which n scored ones complete, or n groups of one each with harvest
    trajectory."""
    harvest: Literal["group", "trajectory"] | None = None
    """Unit in which answers enter a batch; null uses the value of the preset. trajectory: every answer is a group of
    one, and the answers to one prompt may be in different batches; it needs an advantage that compares the trajectories
    of a batch (reinforce_pp)."""
    spare_members: int | None = Field(default=None, ge=0, le=100)
    """Trajectories launched per group beyond n; null uses the value of the preset. Once n are scored the others are cut
    off, which favours short answers: compare the drops by length decile (RollPacker)."""
    wave_batches: int | None = Field(default=None, ge=1, le=64)
    """Batches of a wave, for presets with waves: the next wave opens after they are cut; null uses the
    value of the preset (SortedRL: several batches a wave)."""
    spare_groups: int | None = Field(default=None, ge=0, le=4096)
    """Groups open beyond those that the wave needs, for presets with waves; null uses the value of the preset
    (APRIL, RollPacker)."""
    window_groups: int | None = Field(default=None, ge=1)
    """Most groups admitted and not yet trained on; null is (max_staleness + 1) * groups_per_batch. With preset pipeline
    or roll it sets max_staleness, unless that is given: ceil(window_groups / groups_per_batch) - 1
    (PipelineRL, ROLL: a lag in samples)."""
    pool_size: PoolSize = None
    """N': trajectories leased at once over the whole mesh; null uses the value of the preset. auto: the least of what
    the caches of the generators hold, of what the trainer can consume in time, by Little's law on measured times, and
    of the preset's number; it needs a preset without waves and without a barrier, and no segments. With a window of at
    most two batches the trainer's bound is always one batch. Null is auto with copris, unless segment_tokens is set."""
    max_staleness: int | None = Field(default=None, ge=0)
    """Largest staleness of a trained trajectory, in train steps; null uses the value of the preset."""
    on_stale: Literal["pace", "mask_old_segments", "evict", "restart", "set_aside"] | None = None
    """Handling of a group that the next step would push over the bound; null uses the value of the preset. pace: it
    blocks the cut until it finishes; mask_old_segments: its old tokens leave the loss; evict: it is dropped (length
    bias); restart: it loses its tokens and begins again; set_aside: it loses its tokens and waits until a whole batch
    of such groups has collected (both need a preset with waves and a barrier)."""
    straggler_timeout_seconds: float = Field(default=600.0, gt=0)
    """Time for which the same set of unfinished groups may block the next batch before they are evicted and counted. A
    set blocks when the batch must contain it (``pace``), or when the batch lacks groups, no group can be admitted, no
    trajectory waits for a lease or a reward, and part of the pool is idle. The time restarts with another set, and in
    the second case with every trajectory that ends; it does not count while no generator is registered, or while every
    one is pinned to an older policy version than the newest: a rollout that hangs, too, then blocks until
    the pin is released."""
    part_groups: int | None = Field(default=None, ge=0)
    """Groups of a part: until the batch is complete, the trainer computes the gradient of so many ready groups at a
    time, at fixed weights, and makes one optimizer step for the batch. 0 for no parts, null uses the value of the
    preset. It must divide groups_per_batch, with a preset that opens one batch at a time and trainer.minibatches=1
    (StreamRL, FlexMARL)."""
    segment_tokens: int | None = Field(default=None, ge=0)
    """Tokens of one policy version after which an unfinished trajectory rests: it continues under a newer policy, or
    when no other trajectory can run. 0 for no rest, null uses the value of the preset, a share
    of rollout.max_new_tokens, but at least rollout.partial_save_tokens. Episodes that are saved only at
    their end do not rest. A generator that is late with its reload begins another segment of its version."""
    start_order: Literal["admission", "longest_expected"] | None = None
    """Order in which groups start, within blocks of groups_per_batch admitted groups; null uses the value of the
    preset. longest_expected: the longest mean length of the prompt's earlier trajectories first, prompts without any
    before them (StreamRL). It needs prompts that come again (more than one epoch), and a rank correlation of at least
    0.5 between expected and true lengths, measured over the newest 256 groups; below that, and before 32 groups, the
    order is admission."""
    resume_order: Literal["admission", "most_tokens", "nearest_end"] = "admission"
    """Order in which partial trajectories continue, before new ones start, within blocks of groups_per_batch admitted
    groups. admission: the first admitted group first; most_tokens: the most tokens first; nearest_end: the fewest
    tokens to the mean length of the scored trajectories of its group first (how well siblings predict a
    length is exported, and changes no order). CoPRIS and APRIL continue partial trajectories before new ones; the
    orders among them are ours."""
    cut_order: Literal["admission", "shortest", "oldest"] | None = None
    """Order in which ready groups enter a batch, after the groups that later batches could no longer train; null uses
    the value of the preset. admission: the first admitted first; shortest: the fewest tokens of scored trajectories
    first (SortedRL); oldest: the oldest weights first (ROLL)."""
    filter_zero_variance: bool = False
    """Drop groups whose rewards are all equal; refunds their capacity."""
    max_filtered_in_a_row: int | None = Field(default=None, ge=1)
    """Number of consecutive filtered groups, or of consecutive groups without two scored answers, that ends the run
    with an error; null is 10 * groups_per_batch."""
