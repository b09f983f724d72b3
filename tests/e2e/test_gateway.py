"""The page's API of a run as ``rollmesh up`` starts it, and the commands that show it."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from rollmesh.runtime.endpoints import read_endpoints

from .conftest import ENDLESS, WAIT_SECONDS


def test_a_run_is_watched_paused_and_resumed_through_its_gateway(
    started: Callable[..., Any], wait_until: Callable[..., None]
) -> None:
    line, process = started(trainer={"train_steps": ENDLESS})
    wait_until(lambda: bool(read_endpoints(line.folder, "gateway")), "the gateway", process)
    url = read_endpoints(line.folder, "gateway")[0].url
    token = (line.folder / "gateway-token").read_text()
    with httpx.Client(base_url=url, timeout=WAIT_SECONDS) as page, _actor(url, token) as actor:
        wait_until(lambda: _overview(page).get("train_step", 0) >= 2, "two train steps", process)
        wait_until(lambda: _everything_runs(_overview(page)), "a look at every service at work", process)
        wait_until(lambda: bool(_overview(page)["evaluations"]), "the evaluation of the initial policy", process)
        assert [point["policy_version"] for point in _overview(page)["evaluations"]] == [0]
        wait_until(lambda: len(_curves(page)["reward_mean"]["x"]) >= 2, "two step reports", process)
        _check_timeline(page, wait_until)
        _check_trajectories(page, line.folder)
        assert actor.post("api/v1/pause").status_code == 200
        wait_until(lambda: _at_rest(page), "rollouts to come to rest", process)
        before = _overview(page)["totals"]["leases_total"]
        _check_commands(line, url, token)
        assert _overview(page)["totals"]["leases_total"] == before
        assert actor.post("api/v1/resume").status_code == 200
        wait_until(lambda: _overview(page)["totals"]["leases_total"] > before, "new leases", process)
    for log in (line.folder / "logs").glob("*.log"):
        assert token not in log.read_text()


def _actor(url: str, token: str) -> httpx.Client:
    return httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=WAIT_SECONDS)


def _overview(page: httpx.Client) -> dict[str, Any]:
    body: dict[str, Any] = page.get("api/v1/overview").json()
    return body


def _everything_runs(overview: dict[str, Any]) -> bool:
    """Tell whether this snapshot shows the whole mesh training; it may lack tokens or a late service."""
    running = {service["service"]: service["running"] for service in overview["services"]}
    return (
        overview["state"] == "running"
        and running == {"gateway": 1, "generator": 2, "reward": 1, "rollout": 1, "trainer": 1}
        and [generator["serving"] for generator in overview["generators"]] == [True, True]
        and overview["rates"]["saved_tokens_per_second"] > 0
        and overview["report"] is not None
        and overview["report"]["train_step"] >= 1
    )


def _curves(page: httpx.Client) -> dict[str, Any]:
    return {curve["name"]: curve for curve in page.get("api/v1/series").json()["series"]}


def _at_rest(page: httpx.Client) -> bool:
    overview = _overview(page)
    return overview["state"] == "paused" and overview["trajectories"]["leased"] == 0


def _check_timeline(page: httpx.Client, wait_until: Callable[..., None]) -> None:
    """Rollouts of this mesh last a second or so: some look sees one that has tokens."""

    instances = {generator["instance_id"] for generator in _overview(page)["generators"]}

    def written() -> bool:
        timeline = page.get("api/v1/timeline").json()
        written = [span for span in timeline["rollouts"] if span["intervals"] and span["worker"] == "rollout-0"]
        return any(span["generator"] in instances for span in written)

    wait_until(written, "a rollout with tokens on the timeline")


def _check_trajectories(page: httpx.Client, folder: Path) -> None:
    sample = json.loads((folder / "samples.jsonl").read_text().splitlines()[0])
    detail = page.get(f"api/v1/trajectories/{sample['trajectory_id']}").json()
    assert (detail["found_in"], detail["train_step"]) == ("batch", sample["train_step"])
    assert "".join(detail["runs"][0]["texts"]) == sample["prompt"]
    policy = [run for run in detail["runs"] if run["source"] == "policy"]
    assert sorted({run["policy_version"] for run in policy}) == sample["policy_versions"]
    assert sum(len(run["token_ids"]) for run in policy) == sample["token_count"]
    assert all(logprob <= 0 for run in policy for logprob in run["logprobs"])
    curves = _curves(page)
    assert len(curves["evaluation"]["x"]) == 1
    assert max(curves["tokens_per_second"]["high"]) > 0


def _check_commands(line: Any, url: str, token: str) -> None:
    status = line.run("status", str(line.folder))
    assert url in status.stdout, status.stdout + status.stderr
    assert token in status.stdout
    shown = line.run("top", str(line.folder), "--once")
    assert shown.returncode == 0, shown.stderr
    assert re.search(r"state\s+paused", shown.stdout)
    assert "an operator to resume" in shown.stdout
    overview = json.loads(line.run("top", "--url", url, "--json").stdout)
    assert overview["paused_by_person"] is True
    gone = line.run("top", "--url", "http://127.0.0.1:9", "--once")
    assert gone.returncode == 2
    assert "http://127.0.0.1:9/api/v1/overview" in gone.stderr


def test_a_gateway_that_cannot_listen_does_not_end_the_run(
    started: Callable[..., Any], wait_until: Callable[..., None]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        quick = {"trainer": {"train_steps": 2}, "evaluation": {"before_and_after": False}}
        line, process = started(gateway={"port": port}, **quick)
        output, _ = process.communicate(timeout=2 * WAIT_SECONDS)
    assert process.returncode == 0, output
    assert "the run continues without its page" in output
    assert f"gateway.port={port}" in output
    assert len(line.json_lines("metrics.jsonl")) == 2
