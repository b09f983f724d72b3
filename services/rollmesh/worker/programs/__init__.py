"""Rollout programs, each of which turns a prompt into a finished trajectory."""

from rollmesh.worker.program import Program, RolloutContext, RolloutResult
from rollmesh.worker.programs.single_turn import SingleTurnProgram

__all__ = ["Program", "RolloutContext", "RolloutResult", "SingleTurnProgram"]
