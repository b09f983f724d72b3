"""Rollouts by a real environment server of verifiers: rewards and exact tokens, its tools, its death in an episode."""

import asyncio
import json
import shutil
import subprocess
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rollmesh.agents.hosted_agent import hosted_agent
from rollmesh.runtime.addresses import free_port
from rollmesh.tasks.environments.environment_protocol import load_agent
from rollmesh.types import OutcomeKind, SegmentSource, Trajectory

from ...kit.verifiers_programs import document_script, script, verifiers_server
from .agent_client import http_of
from .agent_mesh import TOKEN, AgentMesh, Api
from .tool_model import ADD, QUESTION

MODULE = "verifiers_sums"


def serving(address: str, folder: Path) -> AbstractContextManager[None]:
    return verifiers_server(address, MODULE, TOKEN, folder / "environment.log")


def tasks_of(module: str, **changes: str) -> list[dict[str, Any]]:
    """Rows with the tasks of a taskset, by the script of the document with texts in it replaced."""
    words = document_script("tasks", module, **changes)
    done = subprocess.run(**words, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def write_rows(file: Path, **changes: Any) -> dict[str, Any]:
    """Rows with the taskset's tasks, as a run's source."""
    rows = tasks_of(MODULE)
    for row in rows:
        row["task_data"] = json.dumps(json.loads(row["task_data"]) | {"tools": [ADD], **changes})
    file.write_text("\n".join(map(json.dumps, rows)))
    return {"source": {"type": "jsonl", "path": str(file), "chat": True}}


@asynccontextmanager
async def agent(mesh: AgentMesh, address: str) -> AsyncIterator[Api]:
    function = load_agent("verifiers", {"address": address})
    async with mesh.api() as api, hosted_agent(api.service, api.app, function, TOKEN, api.url, api.shutdown):
        yield api
        api.shutdown.set()


TRAIN = """
import asyncio, json, sys
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.serve import EnvClient
from verifiers.v1.types import SamplingConfig

async def main(address, base_url, model, tokenizer, task):
    client = EnvClient(address)
    await client.wait_for_server_startup()
    chosen = TrainClientConfig(base_url=base_url, api_key_var="ROLLMESH_API_KEY", renderer={"name": "qwen3"},
                               renderer_model_name=tokenizer)
    episode = await client.run(chosen, model, SamplingConfig(temperature=1.0), json.loads(task))
    assert episode.ok, episode.traces[0].errors
    (branch,) = episode.traces[0].branches
    print(json.dumps([branch.token_ids, branch.sampled_mask, branch.logprobs]))
    await client.close()

asyncio.run(main(*sys.argv[1:]))
"""
"""A trainer of verifiers: one episode by its train client, which renders messages itself."""


def trajectories(batch: Any) -> list[Trajectory]:
    return [trajectory for group in batch.groups for trajectory in group.trajectories]


def check_exact(mesh: AgentMesh, trajectory: Trajectory) -> None:
    """The row's answer decides the reward of the exact tokens."""
    assert trajectory.outcome is not None and trajectory.outcome.kind is OutcomeKind.SCORED
    right = float(json.loads(trajectory.prompt.metadata["task_data"])["answer"] == 5)
    assert trajectory.outcome.value == 2 * right  # its weight
    assert trajectory.outcome.parts == {"agent": 2 * right, "right": right, "turns": 2.0}
    check_tokens(mesh, trajectory)


def check_tokens(mesh: AgentMesh, trajectory: Trajectory) -> None:
    """The tokens are those of the whole conversation."""
    text = mesh.tokenizer.decode(trajectory.response_ids, special_tokens=True)
    assert text.endswith("It is 5.<|im_end|>") and "<tool_response>\n5\n</tool_response>" in text


async def test_an_environment_server_killed_in_an_episode_costs_its_rollouts_alone(
    make_tools_mesh: Callable[..., Any], tmp_path: Path
) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    gate = tmp_path / "gate"
    mesh = await make_tools_mesh(
        data=write_rows(tmp_path / "rows.jsonl", gate=str(gate)), schedule={"pool_size": 4, "groups_per_batch": 1}
    )
    async with agent(mesh, address) as api:
        with serving(address, tmp_path):
            calls = {"endpoint": "chat", "recorded": "yes", "outcome": "answered"}
            await mesh.until("tools wait", lambda: arrived(api, "rollmesh_agents_calls_total", 4, **calls))
        await mesh.until("rollouts have failed", lambda: failed(mesh, 4))
        gate.touch()
        with serving(address, tmp_path):
            trained = [trajectory for step in (1, 2, 3) for trajectory in trajectories(await mesh.batch(step))]
            for trajectory in trained:
                check_exact(mesh, trajectory)
            assert {trajectory.outcome.value for trajectory in trained} == {0.0, 2.0}
        for outcome in ("forked", "restarted"):
            assert api.value("rollmesh_agents_drift_total", outcome=outcome) == 0
    counts = await mesh.store.mesh.counts()
    assert counts.totals["scored_total"] == counts.totals["finished_total"] - counts.totals["unscorable_total"]


async def arrived(api: Api, name: str, least: int, **labels: str) -> bool:
    return api.value(name, **labels) >= least


async def failed(mesh: AgentMesh, least: int) -> bool:
    counts = await mesh.store.mesh.counts()
    return bool(counts.totals.get("unscorable_total", 0) >= least)


class Resources(BaseHTTPRequestHandler):
    """Resources of NeMo Gym, as its users write them: a tool, and the score of a response."""

    def do_POST(self) -> None:
        sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer: Any = {}
        if self.path == "/add":
            answer = 5 if sent == {"a": 2, "b": 3} else "five"
        elif self.path == "/verify":
            *_, message = sent["response"]["output"]
            answer = {**sent, "reward": float(sent["answer"] in message["content"][0]["text"]), "read": 1}
        self.send_response(200)
        self.end_headers()
        self.wfile.write((answer if isinstance(answer, str) else json.dumps(answer)).encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.long  # it starts a process for each episode
async def test_an_environment_a_harness_and_a_tool_server_of_the_package_work_unchanged(
    make_tools_mesh: Callable[..., Any], tmp_path: Path
) -> None:
    address, rows, dataset = f"tcp://127.0.0.1:{free_port()}", tmp_path / "rows.jsonl", tmp_path / "gym.jsonl"
    asked = {"input": [QUESTION], "tools": [{"type": "function", **ADD["function"]}]}
    dataset.write_text("\n".join(json.dumps({"responses_create_params": asked, "answer": n}) for n in ("5", "6")))
    with ThreadingHTTPServer(("127.0.0.1", 0), Resources) as resources:
        threading.Thread(target=resources.serve_forever, daemon=True).start()
        gym = {
            "dataset": str(dataset),
            "task": {"resources_url": f"http://127.0.0.1:{resources.server_port}"},
        }
        tasks = tasks_of("verifiers_gym", **{"id=name": f"id=name, **{gym}"})
        rows.write_text("\n".join(map(json.dumps, tasks)))
        source = {"type": "jsonl", "path": str(rows), "chat": True}
        mesh = await make_tools_mesh(data={"source": source}, schedule={"pool_size": 2, "groups_per_batch": 1})
        changes = {'"id": sys.argv[1]': f'"id": sys.argv[1], **{gym}'}
        with verifiers_server(address, "verifiers_gym", TOKEN, tmp_path / "environment.log", "null", **changes):
            async with agent(mesh, address) as api:
                for trajectory in trajectories(await mesh.batch(1)):
                    check_tokens(mesh, trajectory)
                    right = float(json.loads(trajectory.prompt.metadata["task_data"])["row"]["answer"] == "5")
                    assert trajectory.outcome is not None
                    assert trajectory.outcome.parts == {"agent": right, "nemo_gym": right, "read": 1.0}
            assert api.value("rollmesh_agents_drift_total", outcome="forked") == 0
        resources.shutdown()


@pytest.mark.long  # three processes that import verifiers
async def test_the_train_client_of_verifiers_records_the_sample_that_it_would_train_on(
    make_tools_mesh: Callable[..., Any], tmp_path: Path
) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    mesh = await make_tools_mesh(data=write_rows(tmp_path / "rows.jsonl"), schedule={"groups_per_batch": 1})
    samples = {}
    tokenizer = tmp_path / "tokenizer"  # without config.json, for which transformers adds an unknown token of Qwen2
    tokenizer.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(mesh.config.model.path) / name, tokenizer)
    async with mesh.api() as api, http_of(api) as http:
        with serving(address, tmp_path):
            for _ in range(mesh.config.schedule.group_size):
                told = (await http.post("/sessions", json={"wait_seconds": 90})).json()
                base_url = f"{api.url}/sessions/{told['id']}/v1"
                sent = (address, base_url, told["model"], str(tokenizer), told["task"]["task_data"])
                done = await asyncio.to_thread(
                    subprocess.run, **script(TRAIN, *sent, token=TOKEN), stdout=subprocess.PIPE, text=True, check=True
                )
                shown = (await http.get(f"/sessions/{told['id']}")).json()
                assert shown["drift_count"] == 0
                samples[shown["trajectories"][0]["id"]] = json.loads(done.stdout)
                await http.post(f"/sessions/{told['id']}/reward", json={"reward": 1.0})
        trained = trajectories(await mesh.batch(1))
    assert {trajectory.trajectory_id for trajectory in trained} == set(samples)
    for trajectory in trained:
        token_ids, mask, logprobs = samples[trajectory.trajectory_id]
        lists = [
            (s.token_ids.tolist(), s.source is SegmentSource.POLICY, s.behavior_logprobs) for s in trajectory.segments
        ]
        assert [*trajectory.prompt.token_ids.tolist(), *(t for ids, _, _ in lists for t in ids)] == token_ids
        own = [is_own for ids, is_own, _ in lists for _ in ids]
        assert [False] * len(trajectory.prompt.token_ids) + own == mask
        recorded = [value for _, _, values in lists if values is not None for value in values.tolist()]
        assert recorded == pytest.approx(
            [value for value, is_own in zip(logprobs, mask, strict=True) if is_own], abs=1e-5
        )
