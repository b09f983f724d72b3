"""Numbers and lists as text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rollmesh.store.queue_types import DomainScore

_LISTED = 5


def percent(share: float | None) -> str | None:
    """Format a share as ``12.3%``."""
    return None if share is None or math.isnan(share) else f"{100 * share:.1f}%"


def count(value: float | None) -> str | None:
    """Format a number as ``12,345``."""
    return None if value is None or math.isnan(value) else f"{value:,.0f}"


def duration(seconds: float | None) -> str | None:
    """Format seconds as ``45 s``, ``3 min 20 s`` or ``2 h 05 min``."""
    if seconds is None or math.isnan(seconds):
        return None
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def plus_minus(error: float | None, spec: str = ".3f") -> str:
    """Format a standard error as ``± 0.012``; unknown for fewer than two samples."""
    return "± unknown" if error is None or math.isnan(error) else f"± {error:{spec}}"


def domain_scores(domains: Mapping[str, DomainScore]) -> list[str]:
    """Describe the scores of an evaluation by domain, one line each."""
    return [
        f"{name} {score['mean']:.3f} {plus_minus(score['standard_error'])} (n={score['n']})"
        for name, score in domains.items()
    ]


def fewer_prompts(requested: float, existing: float) -> str:
    """State that an evaluation had fewer prompts than the run file asks for, with the remedies."""
    return (
        f"the evaluation split has {existing:.0f} of evaluation.prompt_count={requested:.0f} prompts: add rows, raise "
        "data.held_out_ratio, or set data.evaluation_source"
    )


def gap(value: float | None) -> str:
    """Format a difference of log-probabilities."""
    return "-" if value is None else f"{value:.2g}"


def listed(items: Sequence[str]) -> str:
    """List the first five items, and count the others."""
    rest = len(items) - _LISTED
    return ", ".join(items[:_LISTED]) + (f" and {rest} more" if rest > 0 else "")
