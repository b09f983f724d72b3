"""One trace per trajectory through every process of a real run, a killed worker included."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from rollmesh.checkpoints.bucket import open_checkpoints
from rollmesh.config import RunConfig, load_run_config
from rollmesh.launcher.redis import running_store
from rollmesh.launcher.run_folder import RunFolder
from rollmesh.runtime.endpoints import read_endpoints
from rollmesh.runtime.spans import TraceContext, traceparent_of, traceparent_of_step
from rollmesh.types import Batch, Trajectory

from .conftest import ENDLESS, WAIT_SECONDS
from .otlp_collector import ReceivedSpan, collector

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


def test_a_trajectory_is_one_trace_over_all_services_even_when_its_worker_is_killed(started, wait_until) -> None:
    with collector() as received:
        line, process = started(
            trainer={"train_steps": ENDLESS},
            telemetry={"otlp_endpoint": received.url},
            gateway={"enabled": True},
            evaluation={"before_and_after": False},
            store={"heartbeat_seconds": 1.0, "session_ttl_seconds": 5.0},
            # Slow enough for the kill to meet trajectories that have saved tokens.
            generator={"pace": [[1, 0.02]]},
            rollout={"max_new_tokens": 128, "partial_save_tokens": 16},
        )
        line.trains(process, STEPS)
        config = load_run_config(line.folder / "config.yaml", environ={})
        checkpoints = open_checkpoints(config)
        trained: list[Batch] = []
        complete: set[int] = set()
        batches: list[Batch] = []

        def traced() -> bool:
            """Look for successive batches with all their spans, whichever they are.

            On a machine that stalls, the spans that a process exports at that time may be lost.
            """
            steps = range(len(trained) + 1, len(line.steps) + 1)
            trained.extend(checkpoints.read_batch(step) for step in steps)
            traces = received.traces()
            for batch in trained:
                if batch.train_step not in complete and not lacking(traces, batch, config.name):
                    complete.add(batch.train_step)
            for at in range(len(trained) - STEPS + 1):
                window = trained[at : at + STEPS]
                if complete.issuperset(batch.train_step for batch in window):
                    batches[:] = window
                    return True
            return False

        # A process that is killed takes its last second of spans with it, so these have to be there before.
        wait_until(traced, "the spans of some steps", process)
        (worker,) = read_endpoints(line.folder, "rollout")
        wait_until(lambda: stopped_half_way(worker.pid, config, line.folder), "rollouts with saved tokens", process)
        os.kill(worker.pid, signal.SIGKILL)
        wait_until(lambda: any(map(continued, received.traces().values())), "a trajectory that goes on", process)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=WAIT_SECONDS)
        assert process.returncode == 130, output
    traces = received.traces()
    assert received.paths == {"/v1/traces"}
    for batch in batches:
        check_step(traces[step_trace(config.name, batch.train_step)], batch)
        for trajectory in trajectories_of(batch):
            check_trajectory(traces[trace_id(trajectory.traceparent)], trajectory, batch.train_step)
    loads = policy_loads(traces)
    assert max(span.attributes["rollmesh.policy_version"] for span in loads) > 0
    assert {span.instance for span in loads} == {"generator-0", "generator-1"}
    check_logs(line, config.name)


def stopped_half_way(worker: int, config: RunConfig, folder: Path) -> bool:
    """Stop a worker that holds rollouts with saved tokens. False, and the worker goes on, if it has none by then."""
    # Where the trainer is slow, rollouts start in waves, and at the first look at one nothing of it is saved.
    if asyncio.run(half_way(config, folder)) < 3:
        return False
    os.kill(worker, signal.SIGSTOP)
    if asyncio.run(half_way(config, folder)):
        return True
    os.kill(worker, signal.SIGCONT)
    return False


async def half_way(config: RunConfig, folder: Path) -> int:
    """Rollouts under way of which the queue has some tokens."""
    async with running_store(config, RunFolder(folder)) as running:
        marks, _ = await running.store.inspection.trajectory_page("leased", None, 100)
    return sum(mark.token_count > 0 for mark in marks)


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


def continued(spans: list[ReceivedSpan]) -> bool:
    """Tell whether a second worker continued the tokens of a killed worker, whose own span is lost."""
    attempts = [span for span in spans if span.name == "attempt"]
    calls = [span for span in spans if span.service == "rollmesh-generator" and span.name == "generate"]
    resumed = [span for span in attempts if span.attributes["rollmesh.resumed_tokens"] > 0]
    return len(resumed) == len(attempts) == 1 and len(calls) > 1


def check_logs(line, run: str) -> None:
    """Every service writes nothing but JSON lines with the run; lines about a step lead to its trace."""
    cuts = []
    for service in ("rollout-0", "generator-0", "generator-1", "reward-0", "trainer-0", "gateway-0"):
        text = (line.folder / "logs" / f"{service}.log").read_text()
        for row in map(json.loads, text.splitlines()):
            assert (row["run"], row["service"]) == (run, service)
            if row["event"] == "batch_cut":
                cuts.append(row)
    assert cuts
    for row in cuts:
        assert row["trace_id"] == trace_id(traceparent_of_step(run, row["train_step"]))
        assert row["policy_version"] >= 0
