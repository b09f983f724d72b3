from rollmesh.rollout.rollout_metrics import RolloutMetrics
from rollmesh.runtime.metrics import Metrics


def test_counters_exist_at_zero_before_their_first_event():
    metrics = Metrics("rollout")
    RolloutMetrics(metrics)
    text = metrics.exposition().decode()
    for line in (
        'rollmesh_rollout_calls_ended_total{reason="hung"} 0.0',
        'rollmesh_rollout_trajectories_dropped_total{reason="taken_back"} 0.0',
        'rollmesh_rollout_groups_evicted_total{reason="stale"} 0.0',
        'rollmesh_rollout_sampled_tokens_total{age="4+"} 0.0',
    ):
        assert line in text


def test_tokens_of_old_versions_share_one_label():
    metrics = Metrics("rollout")
    rollout = RolloutMetrics(metrics)
    for age in (0, 3, 4, 900):
        rollout.sampled(5, age)
    values = {
        a: metrics.registry.get_sample_value("rollmesh_rollout_sampled_tokens_total", {"age": a})
        for a in ("0", "3", "4+")
    }
    assert values == {"0": 5, "3": 5, "4+": 10}
