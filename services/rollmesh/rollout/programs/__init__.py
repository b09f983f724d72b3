"""Rollout programs: what happens between a prompt and a finished trajectory."""

from rollmesh.holding.program import Ending, Program, Rollout
from rollmesh.rollout.programs.single_turn import SingleTurnProgram

__all__ = ["Ending", "Program", "Rollout", "SingleTurnProgram"]
