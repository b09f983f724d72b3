"""Arms behind the recommendations of docs/schedules.md: pools of ``copris``, and switches of it, at three setups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
_GROUPS, _MEMBERS, _GENERATORS = 32, 8, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RecommendationSetup:
    """One model with its devices and lengths."""

    title: str
    longest: int
    """Most tokens of a response."""
    settings: Sequence[str]
    """Fields of ``SimulationSetup``."""

    def arm(self, seed: int, *overrides: str) -> Arm:
        """Return the run of ``copris`` with overrides of its run file."""
        sizes = (
            f"rollout.max_new_tokens={self.longest}",
            f"generator.max_context_tokens={self.longest + 512}",
            f"schedule.groups_per_batch={_GROUPS}",
            f"schedule.group_size={_MEMBERS}",
            f"generator.replicas={_GENERATORS}",
            # Room for the largest pool: the pool decides, not the slots.
            f"generator.slots={int(max(POOL_RATIOS) * _GROUPS * _MEMBERS) // _GENERATORS}",
        )
        # Prompts come again after 5 updates, as longest_expected needs.
        settings = [*self.settings, f"seed={seed}", f"prompts={5 * _GROUPS}"]
        (arm,) = arms_of(None, [*sizes, *overrides], settings, [])
        return arm

    def pool_arm(self, seed: int, ratio: float) -> Arm:
        """Return the run with a pool of ``ratio`` batches."""
        return self.arm(seed, f"schedule.pool_size={int(ratio * _GROUPS * _MEMBERS)}")


SETUPS = (
    RecommendationSetup(title="7B, 16k", longest=16_000, settings=("model=7b", "trainer_devices=4")),
    RecommendationSetup(
        title="32B, 32k",
        longest=32_000,
        settings=(
            "model=32b",
            "tensor_parallel=4",
            "trainer_devices=16",
            "lengths=lognormal:median=10000,sigma=0.8,share=0.9",
        ),
    ),
    RecommendationSetup(
        title="1.5B, 8k",
        longest=8000,
        settings=("model=1.5b", "trainer_devices=4", "lengths=lognormal:median=2500,sigma=0.8,share=0.9"),
    ),
)
"""Four generators each, on H100, and a trainer with as many devices as the generators."""
