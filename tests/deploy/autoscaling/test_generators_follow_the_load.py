"""The chart's rule on a real mesh: a real Prometheus, real generators that come and go, and nothing lost.

Emulated latency: the generators sleep every decode step to 50 ms (`generator.pace`), so that they and not the two
cores are the bottleneck, and three of them are worth three. The lull is emulated too: SIGSTOP holds the trainer for
most of its time, as a neighbour on its cores would.
"""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from rollmesh.runtime.endpoints import read_endpoints

from ...e2e.conftest import CommandLine, write_small_run
from ...kit.waiting import until
from ..prometheus.conftest import running_prometheus, tool
from .hpa import ReplicaMemory, ReplicaMetrics, next_replicas
from .rule import load_rule

pytestmark = [pytest.mark.long, pytest.mark.slow]

REPOSITORY = Path(__file__).parents[3]
RULES = REPOSITORY / "helm" / "rollmesh" / "files" / "autoscaling"
SPEED_UP = 20.0
"""Of the rule's times: five minutes become fifteen seconds."""
ROUND_SECONDS = 15.0
"""Between two looks of a HorizontalPodAutoscaler."""
MOST = 3
MEASURED_SECONDS = 10.0
WAIT_SECONDS = 300.0
"""Seconds for what takes some ten on an idle machine."""

RUN = {
    "schedule": {"preset": "copris", "groups_per_batch": 4, "group_size": 4, "pool_size": 24, "max_staleness": 4},
    "generator": {"replicas": 1, "slots": 8, "pace": [[1, 0.05], [8, 0.05]], "max_context_tokens": 640},
    "trainer": {"train_steps": 100_000, "learning_rate": 4e-4},
    "evaluation": {"before_and_after": False},
    "rollout": {"max_new_tokens": 128, "partial_save_tokens": 16},
    "checkpoints": {"keep_last": 1000},
}
PACED_TOKENS_PER_SECOND = 8 / 0.05
"""Of one generator with all slots busy."""


def tokens_per_second(mesh: CommandLine, generators: int, right: Callable[[float], bool]) -> float:
    """Sampled over some seconds in which as many generators serve all the time, at a rate that is right.

    A machine that stalls spoils one such while, or hides a generator from a look; what is wrong spoils every one, and
    the last rate is returned then.
    """
    end = time.monotonic() + WAIT_SECONDS
    rate: float | None = None
    while rate is None or not right(rate):
        assert rate is not None or time.monotonic() < end, f"{generators} generators never served for a while"
        if time.monotonic() > end:
            break
        over = time.time() + MEASURED_SECONDS
        until(lambda over=over: any(look["t"] > over for look in mesh.json_lines("timeline.jsonl")[-1:]), "a while")
        looks = [look for look in mesh.json_lines("timeline.jsonl") if look["t"] >= over - MEASURED_SECONDS]
        if {sum(g["serving"] for g in look["generators"]) for look in looks} == {generators}:
            first, last = looks[0], looks[-1]
            rate = (last["generated_token_total"] - first["generated_token_total"]) / (last["t"] - first["t"])
    return rate


@contextmanager
def running(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is asked to stop at the end; its output goes to a file."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **threads})
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
            try:
                process.wait(timeout=120)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def scraped(mesh: CommandLine, folder: Path) -> Iterator[str]:
    """A Prometheus that scrapes the run once a second; yields its address."""
    targets = {"files": [str(mesh.folder / "scrape" / "*.json")], "refresh_interval": "1s"}
    job = {"job_name": "rollmesh", "scrape_interval": "1s", "scrape_timeout": "1s", "file_sd_configs": [targets]}
    # The evaluation interval is the resolution of subqueries.
    with running_prometheus(folder, {"global": {"evaluation_interval": "1s"}, "scrape_configs": [job]}) as url:
        yield url


def answers(prometheus: str, service: str) -> dict[str, float | None]:
    """Return the current value of every signal of a chart rule; None without data, or with a duplicate series."""
    rule = load_rule(RULES / f"{service}.yaml")
    found: dict[str, float | None] = {}
    for each in rule.signals:
        reply = httpx.post(
            f"{prometheus}/api/v1/query", data={"query": rule.query(each, 'run="load"', SPEED_UP)}, timeout=WAIT_SECONDS
        )
        assert reply.status_code in (200, 422), reply.text
        data = reply.json().get("data", {"result": []})
        points = [data["result"]] if data.get("resultType") == "scalar" else [row["value"] for row in data["result"]]
        found[each.name] = float(points[0][1]) if len(points) == 1 else None
    return found


@contextmanager
def autoscaled(mesh: CommandLine, prometheus: str) -> Iterator[list[int]]:
    """A HorizontalPodAutoscaler by the chart's generator rule; yields the numbers that it has asked for."""
    rule = load_rule(RULES / "generator.yaml").model_copy(update={"maxReplicas": MOST})
    asked: list[int] = []
    over = threading.Event()

    def follow() -> None:
        wanted, memory = 1, ReplicaMemory()
        while not over.wait(ROUND_SECONDS / SPEED_UP):
            try:
                values = answers(prometheus, "generator")
            except httpx.HTTPError:
                continue  # a round without an answer decides nothing
            metrics = ReplicaMetrics(now=time.monotonic(), wanted=wanted, ready=mesh.serving(), values=values)
            before, (wanted, memory) = wanted, next_replicas(rule, memory, metrics, SPEED_UP)
            if wanted != before:
                subprocess.run(mesh.command("scale", str(mesh.folder), f"generator={wanted}", "--force"), check=True)
                asked.append(wanted)

    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(follow)
        try:
            yield asked
        finally:
            over.set()
        following.result()


@contextmanager
def slow_trainer(mesh: CommandLine) -> Iterator[None]:
    """Let the trainer run for an eightieth of its time: slower than one generator, however fast the machine is."""
    (trainer,) = read_endpoints(mesh.folder, "trainer")
    over = threading.Event()

    def throttle() -> None:
        while not over.is_set():
            os.kill(trainer.pid, signal.SIGSTOP)
            over.wait(11.85)
            os.kill(trainer.pid, signal.SIGCONT)
            over.wait(0.15)

    thread = threading.Thread(target=throttle)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.timeout(1800)  # every deadline inside passes first
def test_generators_follow_the_load_by_the_charts_rule_and_nothing_is_lost(tmp_path: Path) -> None:
    tool("prometheus")
    mesh = write_small_run(tmp_path, name="load", **RUN)
    rate: dict[str, float] = {}
    with (
        running(mesh.command("up", str(mesh.run_file)), tmp_path / "up.log") as launcher,
        scraped(mesh, tmp_path) as prometheus,
    ):
        until(lambda: mesh.steps, "the first train step")
        # A stall in this while would make everything after it look fast.
        rate["1 generator"] = tokens_per_second(mesh, 1, lambda now: now > 0.6 * PACED_TOKENS_PER_SECOND)
        for service in ("generator", "reward", "rollout"):
            # A scrape that came late leaves a gap of a moment.
            until(
                lambda service=service: None not in answers(prometheus, service).values(),
                f"an answer of every signal of {service}",
            )
        with autoscaled(mesh, prometheus) as asked:
            until(lambda: mesh.serving() == MOST, "three generators")
            rate["3 generators"] = tokens_per_second(mesh, MOST, lambda now: now > 2.0 * rate["1 generator"])
            starved = answers(prometheus, "generator")
            with slow_trainer(mesh):
                until(lambda: [e.index for e in read_endpoints(mesh.folder, "generator")] == [0], "one generator")
                full = answers(prometheus, "generator")
        trained = len(mesh.steps)
        until(lambda: len(mesh.steps) > trained + 4, "the full queue to be trained")
        rate["1 generator again"] = tokens_per_second(mesh, 1, lambda now: 0.5 < now / rate["1 generator"] < 1.6)
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(timeout=120) == 130, (tmp_path / "up.log").read_text()
    mesh.succeeds("audit", str(mesh.folder))
    assert mesh.audit()
    said = f"{rate} tokens/s, 50 ms a decode step; signals while starved {starved}, with a full queue {full}"
    assert {1, MOST} <= set(asked) and 2 in asked[asked.index(MOST) :], said
    assert rate["3 generators"] > 2.0 * rate["1 generator"], said
    assert 0.5 < rate["1 generator again"] / rate["1 generator"] < 1.6, said
