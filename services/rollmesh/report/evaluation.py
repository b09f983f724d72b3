"""Evaluations of a run, as the launcher records them and reports read them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from rollmesh.report.console import domain_scores, fewer_prompts, plus_minus
from rollmesh.report.recorded_run import Record
from rollmesh.store.queue_types import EXISTING_PROMPTS, REQUESTED_PROMPTS, DomainScore


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One line of ``evaluations.jsonl``."""

    policy_version: int
    n: int
    """Number of scores in the mean."""
    mean: float
    standard_error: float | None = None
    """None for fewer than two prompts with a score."""
    details: Mapping[str, float] = field(default_factory=dict)
    """Other statistics, such as the mean length."""
    discarded: int = 0
    when: float | None = None
    """Unix seconds; None if they are not recorded."""
    seconds: float | None = None
    """Seconds from the request to the result."""
    domains: Mapping[str, DomainScore] = field(default_factory=dict)
    """Scores by domain of the prompts; empty without domains."""

    @classmethod
    def read(cls, records: Iterable[Record]) -> list[Self]:
        """Read lines in their order, without those that lack version, n or mean, or have no score (n = 0)."""
        found: list[Self] = []
        for record in records:
            values: dict[str, Any] = {
                k: v for k, v in record.items() if isinstance(v, int | float) and math.isfinite(v)
            }
            if {"policy_version", "n", "mean"} <= values.keys() and values["n"] > 0:
                own = {each.name: values.pop(each.name) for each in fields(cls) if each.name in values}
                found.append(cls(**own, domains=record.get("domains", {}), details=values))
        return found

    def to_json(self) -> str:
        """Return the JSON line, with the details next to the other fields."""
        record = asdict(self)
        details = record.pop("details")
        return json.dumps(record | details)

    @property
    def description(self) -> str:
        """Describe the score for the console; there is none when every response was discarded."""
        if self.n == 0:
            return f"evaluation without a score: none of {self.discarded} answers counts"
        shortage = f"; {self.shortage}" if self.shortage else ""
        whole = f"evaluation {self.mean:.3f} {plus_minus(self.standard_error)} (n={self.n}){shortage}"
        return whole + "".join(f"; {line}" for line in domain_scores(self.domains))

    @property
    def shortage(self) -> str:
        """Reason for fewer prompts than requested; empty if there were enough."""
        if REQUESTED_PROMPTS not in self.details:
            return ""
        return fewer_prompts(self.details[REQUESTED_PROMPTS], self.details[EXISTING_PROMPTS])
