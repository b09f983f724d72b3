"""The environment for NeMo Gym that verifiers ships. Imported there only."""

import verifiers_sums  # noqa: F401  # the programs of the package run with this Python
from verifiers.v1.tasksets.nemo_gym import NeMoGymEnv, NeMoGymTaskset

__all__ = ["NeMoGymEnv", "NeMoGymTaskset"]
