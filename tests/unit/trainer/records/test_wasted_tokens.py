from prometheus_client.samples import Sample

from rollmesh.runtime.metrics import Metrics
from rollmesh.store.queue_types import WASTE_REASONS, StoreCounts
from rollmesh.trainer.records.trainer_metrics import TrainerMetrics

NAME = "rollmesh_trainer_wasted_tokens_total"


def counts(dropped_tokens: dict[str, int]) -> StoreCounts:
    return StoreCounts(
        trajectories={},
        groups={},
        totals={},
        drops={},
        dropped_tokens=dropped_tokens,
        drop_deciles={},
        scoring_queue=0,
        sessions=1,
        dead_letters=0,
        used_memory_bytes=0,
        max_memory_bytes=0,
    )


def wasted(metrics: Metrics) -> dict[str, float]:
    samples: list[Sample] = [s for family in metrics.registry.collect() for s in family.samples if s.name == NAME]
    return {sample.labels["reason"]: sample.value for sample in samples}


def test_tokens_of_members_without_a_score_are_exported_beside_those_of_dropped_groups() -> None:
    metrics = Metrics("trainer")
    trainer = TrainerMetrics(metrics)
    assert wasted(metrics) == dict.fromkeys(WASTE_REASONS, 0), "every reason is there before anything is wasted"
    trainer.groups.observe([], counts({"stale": 5, "unscorable": 7}))
    trainer.groups.observe([], counts({"stale": 6, "unscorable": 27, "dead": 4}))
    assert {reason: n for reason, n in wasted(metrics).items() if n} == {"stale": 1, "unscorable": 20, "dead": 4}
