"""Evaluation section: evaluations of pinned policy versions."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from rollmesh.config.section import Section, Temperature


class EvalConfig(Section):
    """Evaluation of one pinned version, with a separate quota; its answers are never trained on."""

    every_versions: int = Field(default=0, ge=0)
    """Interval of evaluations during the run, in policy versions; 0 evaluates only before and after. One generator
    serves the version during an evaluation, and the others load new versions. With a single generator, the staleness
    bound may delay training."""
    prompt_count: int = Field(default=256, ge=1)
    """Number of prompts of one evaluation, the same each time; an evaluation split with fewer prompts gives all of
    them, and the result says so."""
    samples_per_prompt: int = Field(default=1, ge=1)
    """Answers per prompt. The standard error is over the prompts: answers to one prompt are averaged first."""
    temperature: Temperature = 1.0
    """Softmax temperature; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus mass."""
    top_k: Annotated[int, AfterValidator(lambda top_k: max(top_k, 0))] = Field(default=0, ge=-1)
    """Most likely tokens kept; 0 and -1 keep all."""
    seed: int = 20_000_000
    """Seed of the evaluation prompts and of their sampling noise (engine torch)."""
    before_and_after: bool = True
    """Evaluate the initial and the final policy on an idle mesh."""
