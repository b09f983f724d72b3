"""One trace per trajectory through every process of a real run."""

import pytest

from benchmarks.otlp_collector import ReceivedSpan, collector
from rollmesh.checkpoints.bucket import open_checkpoints
from rollmesh.config import load_run_config
from rollmesh.runtime.spans import TraceContext, traceparent_of, traceparent_of_step
from rollmesh.types import Batch, Trajectory

from .conftest import ENDLESS, interrupted

pytestmark = pytest.mark.long

STEPS = 3
OF_A_TRAJECTORY = {
    ("rollmesh-rollout", "trajectory"),
    ("rollmesh-rollout", "attempt"),
    ("rollmesh-rollout", "generate"),
    ("rollmesh-rollout", "queue.finish"),
    ("rollmesh-rollout", "reward"),
    ("rollmesh-rollout", "queue.score"),
    ("rollmesh-generator", "generate"),
    ("rollmesh-reward", "score"),
    ("rollmesh-trainer", "train"),
}
OF_A_STEP = {
    ("rollmesh-rollout", "cut"),
    ("rollmesh-trainer", "train_step"),
    ("rollmesh-trainer", "claim"),
    ("rollmesh-trainer", "write_batch"),
    ("rollmesh-trainer", "train"),
    ("rollmesh-trainer", "save"),
    ("rollmesh-trainer", "publish"),
}


def trace_id(traceparent: str) -> str:
    place = TraceContext.parse(traceparent)
    assert place is not None
    return f"{place.trace_id:032x}"


def kinds(spans: list[ReceivedSpan]) -> set[tuple[str, str]]:
    return {(span.service, span.name) for span in spans}


def test_a_trajectory_is_one_trace_over_all_services(started, wait_until) -> None:
    with collector() as received:
        line, process = started(
            trainer={"train_steps": ENDLESS},
            telemetry={"otlp_endpoint": received.url},
            gateway={"enabled": True},
            evaluation={"before_and_after": False},
            rollout={"max_new_tokens": 128, "partial_save_tokens": 16},
        )
        line.trains(process, STEPS)
        config = load_run_config(line.folder / "config.yaml", environ={})
        checkpoints = open_checkpoints(config)
        found: list[Batch] = []

        def traced() -> bool:
            """Look for a batch with all its spans: of a machine that stalls, a process may lose those of that time."""
            traces = received.traces()
            batches = (checkpoints.read_batch(step) for step in line.steps)
            found.extend(batch for batch in batches if not (found or lacking(traces, batch, config.name)))
            loads = policy_loads(traces)
            newer = {span.instance for span in loads if span.attributes["rollmesh.policy_version"] > 0}
            return bool(found) and newer == {"generator-0", "generator-1"}

        wait_until(traced, "the spans of a step, and of a reload of either generator", process)
        interrupted(process)
    traces = received.traces()
    assert received.paths == {"/v1/traces"}
    batch = found[0]
    check_step(traces[step_trace(config.name, batch.train_step)], batch)
    for trajectory in trajectories_of(batch):
        check_trajectory(traces[trace_id(trajectory.traceparent)], trajectory, batch.train_step)


def trajectories_of(batch: Batch) -> list[Trajectory]:
    return [trajectory for group in batch.groups for trajectory in group.trajectories]


def step_trace(run: str, step: int) -> str:
    return trace_id(traceparent_of_step(run, step))


def policy_loads(traces: dict[str, list[ReceivedSpan]]) -> list[ReceivedSpan]:
    return [span for spans in traces.values() for span in spans if span.name == "policy_load"]


def lacking(traces: dict[str, list[ReceivedSpan]], batch: Batch, run: str) -> set[tuple[object, ...]]:
    """Return the missing spans of a batch, of its trajectories, and of the loads of the versions that wrote them."""
    expected = [(step_trace(run, batch.train_step), OF_A_STEP)]
    loaded = {span.attributes["rollmesh.policy_version"] for span in policy_loads(traces)}
    missing: set[tuple[object, ...]] = set()
    for trajectory in trajectories_of(batch):
        assert trajectory.traceparent == traceparent_of(run, trajectory.trajectory_id)
        expected.append((trace_id(trajectory.traceparent), OF_A_TRAJECTORY))
        # Not every version is loaded: a generator passes over one that another follows at once.
        missing |= {("policy_load", version) for version in set(trajectory.policy_versions) - loaded}
    return missing | {(trace, *kind) for trace, wanted in expected for kind in wanted - kinds(traces.get(trace, []))}


def check_step(spans: list[ReceivedSpan], batch: Batch) -> None:
    (root,) = [span for span in spans if span.name == "train_step"]
    assert not root.parent_id
    assert root.links == {trace_id(t.traceparent) for t in trajectories_of(batch)}
    assert all(span.parent_id == root.span_id for span in spans if span is not root)


def check_trajectory(spans: list[ReceivedSpan], trajectory: Trajectory, step: int) -> None:
    by_id = {span.span_id: span for span in spans}
    (root,) = [span for span in spans if span.name == "trajectory"]
    assert not root.parent_id
    assert root.attributes["rollmesh.outcome"] == "scored"
    for span in spans:
        if span.service == "rollmesh-generator" and span.parent_id in by_id:
            assert by_id[span.parent_id].name == "generate"
            assert by_id[span.parent_id].service == "rollmesh-rollout"
        if span.service == "rollmesh-reward":
            assert by_id[span.parent_id].name == "reward"
        if span.name == "attempt":
            assert span.parent_id == root.span_id
            assert span.start_ns >= root.start_ns - 50_000_000  # two clocks of one machine: Redis counts in ms
    sampled = [v for span in spans for v in span.attributes.get("rollmesh.policy_versions", []) if span.name != "train"]
    assert set(trajectory.policy_versions) <= set(sampled)
    (trained,) = [span for span in spans if span.name == "train"]
    assert trained.attributes["rollmesh.train_step"] == step
    prefills = [name for span in spans for name, _ in span.events if name == "prefilled"]
    assert prefills
