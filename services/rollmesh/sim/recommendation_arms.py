"""Arms behind the recommendations of docs/schedules.md: pools of ``copris``, and switches of it, at three setups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rollmesh.sim.arms import Arm, arms_of

POOL_RATIOS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
"""N' / (B n)."""
PLAIN_RATIO = 1.5
"""Pool of the preset; the switches are compared with it."""
SEEDS = (0, 1, 2)
SWITCHES: Mapping[str, str] = {
    "automatic pool": "schedule.pool_size=auto",
    "longest first": "schedule.start_order=longest_expected",
    "resume most tokens": "schedule.resume_order=most_tokens",
    "resume nearest end": "schedule.resume_order=nearest_end",
    "placement by tokens": "rollout.placement=tokens",
    "every 2nd version": "generator.reload_every_versions=2",
    "every 4th version": "generator.reload_every_versions=4",
}
"""Field of the run file by switch."""
GENERATORS = 4
REPEAT_UPDATES = 5
"""Updates after which a prompt comes again, as ``longest_expected`` needs."""
_GROUPS, _MEMBERS = 32, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RecommendationSetup:
    """One model with its devices and lengths."""

    title: str
    longest: int
    """Most tokens of a response."""
    model: str
    """Name in ``sim.model_sizes``."""
    devices: int = 1
    """Devices of a generator; the trainer has as many as all generators."""
    lengths: str

    def arm(self, seed: int, *overrides: str) -> Arm:
        """Return the run of ``copris`` with overrides of its run file."""
        sizes = (
            f"rollout.max_new_tokens={self.longest}",
            f"generator.max_context_tokens={self.longest + 512}",
            f"schedule.groups_per_batch={_GROUPS}",
            f"schedule.group_size={_MEMBERS}",
            f"generator.replicas={GENERATORS}",
            # Room for the largest pool: the pool decides, not the slots.
            f"generator.slots={int(max(POOL_RATIOS) * _GROUPS * _MEMBERS) // GENERATORS}",
        )
        settings = (
            f"model={self.model}",
            f"tensor_parallel={self.devices}",
            f"trainer_devices={GENERATORS * self.devices}",
            f"lengths={self.lengths}",
            f"prompts={REPEAT_UPDATES * _GROUPS}",
            f"seed={seed}",
        )
        (arm,) = arms_of(None, [*sizes, *overrides], settings, [])
        return arm

    def pool_arm(self, seed: int, ratio: float) -> Arm:
        """Return the run with a pool of ``ratio`` batches."""
        return self.arm(seed, f"schedule.pool_size={int(ratio * _GROUPS * _MEMBERS)}")


SETUPS = (
    RecommendationSetup(title="7B, 16k", longest=16_000, model="7b", lengths="deepcoder-14b"),
    RecommendationSetup(
        title="32B, 32k",
        longest=32_000,
        model="32b",
        devices=4,
        lengths="lognormal:median=10000,sigma=0.8,share=0.9",
    ),
    RecommendationSetup(
        title="1.5B, 8k",
        longest=8000,
        model="1.5b",
        lengths="lognormal:median=2500,sigma=0.8,share=0.9",
    ),
)
"""Setups of the tables; all else is the simulator's default."""
