"""Retries of an answer after the death of a worker process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import pytest

from rollmesh.reward.reward_metrics import RewardMetrics
from rollmesh.reward.reward_service import Scoring
from rollmesh.reward.worker_pool import WorkerDied
from rollmesh.runtime.metrics import Metrics
from rollmesh.types import OutcomeKind, RewardOutcome
from rollmesh.wire.reward_messages import outcome_to_bytes


class DyingPool:
    """Its workers die of one cause after the other, then one answers."""

    timeout_means_wrong: ClassVar[Mapping[str, bool]] = {}

    def __init__(self, deaths: list[WorkerDied]) -> None:
        self.deaths = deaths

    async def run(self, payload: bytes, timeout_seconds: float) -> bytes:
        if self.deaths:
            raise self.deaths.pop(0)
        return outcome_to_bytes(RewardOutcome(kind=OutcomeKind.SCORED, value=1.0))


def alone() -> WorkerDied:
    return WorkerDied("killed by signal 9")


def together() -> WorkerDied:
    return WorkerDied("the process that started it has ended", with_template=True)


@pytest.mark.parametrize(
    ("deaths", "kind"),
    [
        ([alone()], OutcomeKind.SCORED),
        ([alone(), alone()], OutcomeKind.VERIFIER_ERROR),
        # The next worker was one of the same template, and just as dead.
        ([together(), together()], OutcomeKind.SCORED),
        ([together(), alone(), together()], OutcomeKind.SCORED),
        # An answer that ends every template is no reason to go on for ever.
        ([together() for _ in range(9)], OutcomeKind.VERIFIER_ERROR),
    ],
)
async def test_a_death_with_the_template_is_not_held_against_the_answer(
    deaths: list[WorkerDied], kind: OutcomeKind
) -> None:
    scoring = Scoring(
        DyingPool(deaths),  # type: ignore[arg-type]
        {},
        RewardMetrics(Metrics("reward")),
        default_verifier="exact",
        timeout_seconds=1.0,
        on_unusable_verifier=lambda error: None,
    )
    assert (await scoring.score("", b"")).kind is kind


async def test_a_log_line_about_an_answer_is_short_whatever_the_caller_names(
    capsys: pytest.CaptureFixture[str],
) -> None:
    scoring = Scoring(
        DyingPool([alone(), alone()]),  # type: ignore[arg-type]
        {},
        RewardMetrics(Metrics("reward")),
        default_verifier="exact",
        timeout_seconds=1.0,
        on_unusable_verifier=lambda error: None,
    )
    outcome = await scoring.score("x" * 100_000, b"")
    assert outcome.kind is OutcomeKind.VERIFIER_ERROR
    assert "answer_without_value" in (line := capsys.readouterr().out)
    assert len(line) < 2_000
