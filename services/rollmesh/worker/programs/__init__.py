"""Rollout programs: what happens between a prompt and a finished trajectory."""

from rollmesh.worker.program import Program, RolloutContext, RolloutResult
from rollmesh.worker.programs.single_turn import SingleTurnProgram

__all__ = ["Program", "RolloutContext", "RolloutResult", "SingleTurnProgram"]
