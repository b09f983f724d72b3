"""Evaluations of agents: the program of the run on fixed rows, answered by one pinned version, and never trained."""

import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from rollmesh.runtime.addresses import free_port
from rollmesh.store.evaluation_requests import evaluation_request
from rollmesh.store.queue_types import EvalResult

from .agent_client import Agent, http_of, state
from .agent_mesh import TOKEN, AgentMesh, agents_process, write_model
from .test_sub_agents import SHARED, sub_agent


async def request(mesh: AgentMesh, version: int) -> None:
    await mesh.store.evaluations.request(evaluation_request(mesh.config.evaluation, version))


async def result_of(mesh: AgentMesh, version: int) -> EvalResult:
    found: list[EvalResult] = []

    async def finished() -> bool:
        records = await mesh.store.evaluations.all()
        found.extend(r.result for r in records if r.result is not None and r.request.policy_version == version)
        return bool(found)

    await mesh.until(f"the evaluation of version {version}", finished)
    return found[0]


EVALUATION = {"kind": "evaluation", "wait_seconds": 90}


async def opened(http: httpx.AsyncClient, **wanted: Any) -> dict[str, Any]:
    answer = await http.post("/sessions", json={**EVALUATION, **wanted})
    assert answer.status_code == 201, answer.text
    told: dict[str, Any] = answer.json()
    return told


async def reward(http: httpx.AsyncClient, session_id: str, value: float) -> None:
    answer = await http.post(f"/sessions/{session_id}/reward", json={"reward": value})
    assert answer.status_code == 200, answer.text


async def call(http: httpx.AsyncClient, told: dict[str, Any]) -> httpx.Response:
    body = {"model": told["model"], "messages": told["messages"], "max_tokens": 10}
    return await http.post("/chat/completions", json=body, headers={"X-Rollmesh-Session": told["id"]})


async def reward_after(http: httpx.AsyncClient, told: dict[str, Any]) -> str:
    """The row of a session that the pinned version has answered."""
    answer = await call(http, told)
    assert answer.status_code == 200 and answer.json()["rollmesh"]["policy_versions"] == [0], answer.text
    await reward(http, told["id"], 1.0)
    group: str = told["group_id"]
    return group


def most_likely(mesh: AgentMesh, version: int, context: list[int], answer: list[int]) -> list[int]:
    """The most likely token at each place of an answer, by transformers' own forward pass."""
    model = AutoModelForCausalLM.from_pretrained(Path(mesh.config.folder) / f"model-{version}").eval()
    with torch.inference_mode():
        logits = model(torch.tensor([[*context, *answer]])).logits[0]
    return logits[len(context) - 1 : -1].argmax(-1).tolist()


async def test_an_outside_agent_evaluates_the_pinned_version_and_nothing_of_it_is_trained(
    make_mesh: Callable[..., Any],
) -> None:
    mesh: AgentMesh = await make_mesh(evaluation={"prompt_count": 2, "temperature": 0})
    await mesh.publish()
    await mesh.serving(1)
    await request(mesh, 0)
    async with mesh.api() as api, http_of(api) as http:
        for value in (1.0, 0.0):
            told = await opened(http)
            assert (told["kind"], told["policy_version"]) == ("evaluation", 0)
            agent = Agent(api, told)
            for _ in range(2):
                answer = await agent.turn(max_tokens=12)
                ids = answer.choices[0].token_ids
                by_version = [most_likely(mesh, version, answer.prompt_token_ids, ids) for version in (0, 1)]
                assert by_version[0] == ids != by_version[1]
            assert [t["policy_versions"] for t in (await state(http, agent.id))["trajectories"]] == [[0]]
            await reward(http, agent.id, value)
            assert (await state(http, agent.id))["state"] == "rewarded"
        result = await result_of(mesh, 0)
        # Two prompts with means 1 and 0: standard deviation sqrt(1/2), divided by sqrt(2).
        assert (result.mean, result.sample_count, result.discarded_count) == (0.5, 2, 0)
        assert result.standard_error == pytest.approx(0.5)
        assert await mesh.store.policies.pinned() is None
        counts = await mesh.store.mesh.counts()
        assert counts.trajectories["leased"] == counts.trajectories["scored"] == 0
        answer = await http.post("/sessions", json={"kind": "evaluation", "wait_seconds": 0})
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "no_prompt")
        told = await opened(http, kind="any")
        assert (told["kind"], told["policy_version"]) == ("training", None)


async def test_an_abandoned_session_of_an_evaluation_is_given_again_as_often_as_the_run_allows(
    make_mesh: Callable[..., Any],
) -> None:
    mesh: AgentMesh = await make_mesh(evaluation={"prompt_count": 2}, rollout={"max_attempts": 2})
    await request(mesh, 0)
    given: Counter[str] = Counter()
    async with mesh.api() as api, http_of(api) as http:
        for _ in range(3):
            agent = Agent(api, await opened(http))
            given[agent.told["group_id"]] += 1
            await agent.turn()
            if agent.told["group_id"] == "eval-0":
                assert (await http.delete(f"/sessions/{agent.id}")).status_code == 204
            else:
                await reward(http, agent.id, 1.0)
        result = await result_of(mesh, 0)
    assert given == {"eval-0": 2, "eval-1": 1}
    assert (result.mean, result.sample_count, result.discarded_count) == (1.0, 1, 1)


async def test_an_evaluation_to_which_no_agent_comes_ends_without_a_score(make_mesh: Callable[..., Any]) -> None:
    mesh: AgentMesh = await make_mesh(evaluation={"prompt_count": 30}, rollout={"agent": {"idle_timeout_seconds": 1.0}})
    await request(mesh, 0)
    async with mesh.api() as api:
        result = await result_of(mesh, 0)
        assert (result.sample_count, await mesh.store.policies.pinned()) == (0, None)
        assert api.value("rollmesh_rollout_evaluations_given_up_total") == 1


async def test_drift_and_sub_agents_of_an_evaluation_open_trajectories_outside_of_the_queue(
    make_mesh: Callable[..., Any],
) -> None:
    mesh: AgentMesh = await make_mesh(evaluation={"prompt_count": 1}, **SHARED)
    await request(mesh, 0)
    async with mesh.api() as api, http_of(api) as http:
        parent = Agent(api, await opened(http))
        sub = await sub_agent(api, http, parent.id)
        assert (sub.told["kind"], sub.told["policy_version"]) == ("evaluation", 0)
        first = await parent.turn()
        parent.messages = parent.messages[:1]
        again = await parent.turn()
        assert again.choices[0].token_ids != first.choices[0].token_ids, "another answer to the same question"
        await sub.turn()
        shown = [await state(http, agent.id) for agent in (parent, sub)]
        tokens = [trajectory["tokens"] for each in shown for trajectory in each["trajectories"]]
        assert len(tokens) == 3
        async with mesh.api(index=1) as other, http_of(other) as there:
            await reward(there, parent.id, 0.75)
        result = await result_of(mesh, 0)
        assert (await state(http, sub.id))["state"] == "rewarded"
    assert (result.mean, result.sample_count, result.details["mean_length"]) == (0.75, 1, sum(tokens))
    counts = await mesh.store.mesh.counts()
    assert counts.trajectories["leased"] == counts.totals.get("forks_total", 0) == 0


async def test_agents_are_needed_until_the_last_version_is_evaluated(make_mesh: Callable[..., Any]) -> None:
    mesh: AgentMesh = await make_mesh(
        evaluation={"prompt_count": 1, "every_versions": 1},
        trainer={"train_steps": 1},
        schedule={"groups_per_batch": 1},
    )
    told_codes: Counter[str] = Counter()
    async with mesh.api() as api, http_of(api) as http:

        async def worked() -> bool:
            """What an agent does that takes whatever comes; True once it may leave."""
            answer = await http.post("/sessions", json={"wait_seconds": 0})
            if answer.status_code == 201:
                told = answer.json()
                told_codes[told["kind"]] += 1
                while (answer := await call(http, told)).status_code == 503:
                    pass  # what has become of the session is not known yet: the same call again
                assert answer.status_code in (200, 410), answer.text
                value = told_codes["training"] % 2  # 410 where the last cut has dropped the session
                await http.post(f"/sessions/{told['id']}/reward", json={"reward": value})
                return False
            told_codes[answer.json()["error"]["code"]] += 1
            return bool(told_codes["run_complete"])

        while told_codes["training"] < 2:
            await worked()
        await mesh.batch(1)
        assert not await worked(), "the last policy is not announced"
        await mesh.publish()
        await mesh.until("the end of the run", worked)
        assert (await result_of(mesh, 1)).sample_count == told_codes["evaluation"] == 1


async def test_an_evaluation_whose_service_is_killed_begins_again_with_the_next_one(
    make_mesh: Callable[..., Any],
) -> None:
    mesh: AgentMesh = await make_mesh(
        evaluation={"prompt_count": 2}, generator={"pace": [[1, 0.02]]}, store={"session_ttl_seconds": 5.0}
    )
    port = free_port()
    await mesh.publish()
    await mesh.serving(1)
    await request(mesh, 0)
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{port}/v1",
        headers={"Authorization": f"Bearer {TOKEN}"},
        trust_env=False,
        timeout=120,
    ) as http:
        async with agents_process(mesh, port) as first:
            await reward_after(http, await opened(http))
            told = await opened(http)
            async with http.stream(
                "POST",
                "/chat/completions",
                json={"model": told["model"], "messages": told["messages"], "max_tokens": 200, "stream": True},
                headers={"X-Rollmesh-Session": told["id"]},
            ) as answer:
                await anext(answer.aiter_lines())
                first.send_signal(signal.SIGKILL)
            assert first.wait(60) == -signal.SIGKILL
        async with agents_process(mesh, port):
            rows: set[str] = set()

            async def worked() -> bool:
                """What an agent does until the evaluation is over: a process that stalls may begin it once more."""
                answer = await http.post("/sessions", json={**EVALUATION, "wait_seconds": 1})
                if answer.status_code == 201:
                    rows.add(await reward_after(http, answer.json()))
                return any(record.result for record in await mesh.store.evaluations.all())

            await mesh.until("the evaluation", worked)
            result = await result_of(mesh, 0)
    assert rows == {"eval-0", "eval-1"}
    assert (result.mean, result.sample_count, result.discarded_count) == (1.0, 2, 0)


JUDGE = """
import random

async def rollout(client, row):
    await client.chat.completions.create(model=row["model"], messages=row["messages"])
    return float(row["task"]["answer"]) if row["kind"] == "evaluation" else random.random()
"""


def rows(file: Path, answers: list[float]) -> Path:
    told = [{"prompt": [{"role": "user", "content": f"{n}?"}], "answer": str(n)} for n in answers]
    file.write_text("\n".join(map(json.dumps, told)))
    return file


def run_file(parent: Path) -> Path:
    source = {"type": "jsonl", "path": str(rows(parent / "tasks.jsonl", [0, 1])), "chat": True}
    (parent / "judge.py").write_text(JUDGE)
    data = {
        "name": "hosted",
        "folder": str(parent / "run"),
        "model": {"path": str(write_model(parent / "model", 0))},
        "data": {"source": source, "max_prompt_tokens": 64, "held_out_ratio": 0},
        "rollout": {"program": "agent", "agent": {"function": "judge:rollout"}, "max_new_tokens": 24},
        "reward": {"verifier": "exact"},
        "schedule": {"groups_per_batch": 1, "group_size": 2, "pool_size": 4},
        "generator": {"replicas": 1, "slots": 8, "max_context_tokens": 128, "device": "cpu"},
        "trainer": {"train_steps": 1, "device": "cpu"},
        "evaluation": {"before_and_after": True, "prompt_count": 3},
        "gateway": {"enabled": False},
        "agents": {"port": 0},
    }
    (parent / "run.yaml").write_text(yaml.safe_dump(data))
    return parent / "run.yaml"


def rollmesh(*arguments: str, parent: Path) -> str:
    command = [sys.executable, "-m", "rollmesh.cli.main", *arguments]
    done = subprocess.run(command, cwd=parent, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_hosted_function_is_evaluated_before_and_after_its_run_and_on_other_rows(tmp_path: Path) -> None:
    file, run = run_file(tmp_path), tmp_path / "run"
    rollmesh("up", str(file), "--inline", parent=tmp_path)
    scores = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    assert [(score["policy_version"], score["mean"], score["n"]) for score in scores] == [(0, 0.5, 2), (1, 0.5, 2)]

    other = rows(tmp_path / "other.jsonl", [0.25, 0.5, 0.75])
    score = json.loads(rollmesh("eval", str(run), "--version", "0", "--data", str(other), "--json", parent=tmp_path))
    assert (score["policy_version"], score["mean"], score["n"]) == (0, 0.5, 3)
    # The standard deviation of three values that are 1/4 apart is 1/4.
    assert score["standard_error"] == pytest.approx(0.25 / 3**0.5)
    assert not list(run.glob("evaluation-*"))
