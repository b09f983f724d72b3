"""The commands that look at a run's queue, on an embedded server and without any service."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from rollmesh.cli.main import app
from rollmesh.config import RunConfig, write_run_config
from rollmesh.launcher.redis import embedded_server, running_store
from rollmesh.launcher.run_folder import RunFolder
from rollmesh.mesh import Cursor, Desired
from rollmesh.runtime.endpoints import Endpoint, published_endpoint
from rollmesh.scheduling import run_limits
from rollmesh.store import Append, NewGroup
from rollmesh.store.evaluation_requests import evaluation_request
from rollmesh.store.queue_types import EvalResult
from rollmesh.types import Prompt

from ...kit.records import policy_tokens
from .test_launcher_outages import announce, config


async def fill(run: RunConfig, folder: RunFolder) -> None:
    """Two policies, and a trajectory of five tokens that gave up."""
    async with running_store(run, folder) as running:
        store = running.store
        await store.limits.init_run(run_limits(run))
        leader = await store.leadership.acquire("leader")
        assert leader is not None
        await announce(store, range(2))
        await store.leadership.set_desired(leader, Desired(pool_size=8))
        prompt = Prompt(prompt_id="0", token_ids=np.arange(4, dtype=np.int32), verifier="exact", metadata={})
        group = NewGroup(group_id="e0-0", prompt=prompt, needed=8, epoch=0, index=0)
        assert await store.leadership.admit(leader, [group], Cursor(), Cursor(index=1)) == 1
        session = await store.sessions.open("worker")
        await store.trajectories.lease(session, 1)
        tokens = policy_tokens(range(5), 1)
        await store.trajectories.append(session, [Append(trajectory_id="e0-0.0", token_offset=0, segments=[tokens])])
        assert await store.trajectories.fail(session, [("e0-0.0", "no such luck")]) == 1


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    run = config(tmp_path)
    server = embedded_server(run, RunFolder(tmp_path))
    server.start()
    write_run_config(run, tmp_path / "config.yaml")
    asyncio.run(fill(run, RunFolder(tmp_path)))
    yield tmp_path
    server.stop()


def printed(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_dead_letter_is_listed_inspected_replayed_once_and_deleted(folder: Path) -> None:
    (letter,) = json.loads(printed("dead-letters", "list", str(folder), "--json"))
    assert (letter["trajectory_id"], letter["reason"], letter["token_count"]) == ("e0-0.0", "no such luck", 5)
    assert "no such luck" in printed("dead-letters", "list", str(folder))
    seen = json.loads(printed("dead-letters", "inspect", str(folder), "e0-0.0"))
    assert [s["policy_version"] for s in seen["trajectory"]["segments"]] == [1]
    for _ in range(2):
        assert (
            printed("dead-letters", "replay", str(folder), "e0-0.0")
            == "e0-0.0 replayed as group e0-0r1, when the run has capacity for it\n"
        )
    status = json.loads(printed("status", str(folder), "--json"))
    assert status["view"]["open_groups"] == 1, "the leader opens the replay"
    assert printed("dead-letters", "delete", str(folder), "e0-0.0") == "e0-0.0 deleted\n"
    assert json.loads(printed("dead-letters", "list", str(folder), "--json")) == []
    for command, letter_id in (("inspect", "e7-7.7"), ("delete", "e0-0.0")):
        unknown = CliRunner().invoke(app, ["dead-letters", command, str(folder), letter_id])
        assert unknown.exit_code == 2 and f"no dead letter {letter_id}" in unknown.stderr


def test_a_version_is_pinned_and_released_and_an_unknown_one_refused(folder: Path) -> None:
    released = f"rollmesh pin {folder} --release serves the newest one again"
    assert printed("pin", str(folder)) == f"pinned to policy version 1; {released}\n"
    assert printed("pin", str(folder), "--version", "0") == f"pinned to policy version 0; {released}\n"
    assert asyncio.run(pinned(folder)) == 0
    unknown = CliRunner().invoke(app, ["pin", str(folder), "--version", "9"])
    assert unknown.exit_code == 2 and "9" in unknown.stderr
    assert asyncio.run(pinned(folder)) == 0
    assert printed("pin", str(folder), "--release") == "released\n"
    assert asyncio.run(pinned(folder)) is None


def test_the_link_to_the_page_is_whole_on_a_narrow_terminal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("ROLLMESH_GATEWAY__TOKEN", "a-token" * 12)
    url = "http://127.0.0.1:65535/"
    with published_endpoint(folder, Endpoint(service="gateway", index=0, grpc="", admin="", url=url)):
        assert f"the run as a page: {url}?token={'a-token' * 12}\n" in printed("status", str(folder))


def test_in_a_pod_the_way_to_the_page_is_a_port_forward_because_no_browser_reaches_the_address_of_a_pod(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    monkeypatch.setenv("POD_NAMESPACE", "rl")
    monkeypatch.setenv("ROLLMESH_GATEWAY__TOKEN", "a-token-of-a-run")
    for url, scheme in (("http://10.244.0.17:8080/", "http"), ("https://[fd00::1]:8080/", "https")):
        names = {"service": "gateway", "grpc": "", "admin": "", "pod": "demo-rollmesh-gateway-7d9c-x2x4z"}
        with published_endpoint(folder, Endpoint(index=0, url=url, **names)):
            shown = printed("status", str(folder))
        command = "kubectl port-forward --namespace=rl pod/demo-rollmesh-gateway-7d9c-x2x4z 8080:8080"
        link = f"{scheme}://127.0.0.1:8080/?token=a-token-of-a-run"
        assert f"the run as a page: {command}, then {link}\n" in shown


async def pinned(folder: Path) -> int | None:
    async with running_store(config(folder), RunFolder(folder)) as running:
        return await running.store.policies.pinned()


def test_what_config_shows_is_valid_by_the_schema_it_prints(folder: Path) -> None:
    shown = yaml.safe_load(printed("config", "show", str(folder / "config.yaml"), "--set", "trainer.train_steps=7"))
    assert shown["trainer"]["train_steps"] == 7
    schema = json.loads(printed("config", "schema"))
    jsonschema.validate(shown, schema)
    with pytest.raises(jsonschema.ValidationError, match="shedule"):
        jsonschema.validate({**shown, "shedule": {}}, schema)
    assert schema["$defs"]["ScheduleConfig"]["properties"]["pool_size"]["description"]


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("9", "--version 9: published versions are 0 to 1"),
        ("1", "--version 1: its weights are pruned (checkpoints.keep_last=6); kept are none"),
    ],
)
def test_a_version_without_weights_is_not_evaluated(folder: Path, version: str, message: str) -> None:
    """No generator could serve it, and the command would wait for ever."""
    done = CliRunner().invoke(app, ["eval", str(folder), "--version", version])
    assert done.exit_code == 2
    assert message in done.stderr


def test_a_rollback_is_requested_to_an_announced_version_only(folder: Path) -> None:
    done = CliRunner().invoke(app, ["rollback", str(folder), "--version", "99"])
    assert done.exit_code == 2 and "policy version 99 has not been announced" in done.stderr
    assert "rollback to policy version 0 requested" in printed("rollback", str(folder), "--version", "0")


async def note_evaluation(folder: Path, version: int) -> None:
    """Leave an evaluation of which no answer counts."""
    run = config(folder)
    async with running_store(run, RunFolder(folder)) as running:
        await running.store.evaluations.request(evaluation_request(run.evaluation, version))
        session = await running.store.sessions.open("evaluator")
        request = await running.store.evaluations.claim(session)
        assert request is not None
        result = EvalResult(mean=0.0, standard_error=None, sample_count=0, discarded_count=3)
        await running.store.evaluations.finish(session, request.evaluation_id, result)


def test_an_evaluation_without_a_score_prints_none_and_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run without generators needs none for an evaluation that it has."""
    monkeypatch.setenv("ROLLMESH_GENERATOR__REPLICAS", "0")
    asyncio.run(note_evaluation(folder, 1))
    done = CliRunner().invoke(app, ["eval", str(folder)])
    assert done.exit_code == 1
    assert done.stdout.endswith("policy version 1: evaluation without a score: none of 3 answers counts\n")
    done = CliRunner().invoke(app, ["eval", str(folder), "--json"])
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert (found["policy_version"], found["n"], found["mean"]) == (1, 0, None)


async def close_sessions(folder: Path) -> None:
    async with running_store(config(folder), RunFolder(folder)) as running:
        for session in await running.store.inspection.workers():
            await running.store.sessions.close(session)


async def is_paused(folder: Path) -> bool:
    async with running_store(config(folder), RunFolder(folder)) as running:
        return (await running.store.mesh.view()).launcher_paused


def test_an_evaluation_beside_services_without_a_launcher_leaves_no_pause(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No launcher would ever end it, and an operator cannot."""
    monkeypatch.setenv("ROLLMESH_GENERATOR__REPLICAS", "0")
    monkeypatch.setenv("ROLLMESH_STORE__URL", embedded_server(config(folder), RunFolder(folder)).url)
    asyncio.run(note_evaluation(folder, 1))
    asyncio.run(close_sessions(folder))
    done = CliRunner().invoke(app, ["eval", str(folder)])
    assert done.exit_code == 1 and "evaluation without a score" in done.stdout, done.output
    assert not asyncio.run(is_paused(folder))


def test_a_run_whose_workers_are_alive_is_not_evaluated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock of the run folder tells nothing of services that were started one by one."""
    monkeypatch.setenv("ROLLMESH_STORE__URL", embedded_server(config(folder), RunFolder(folder)).url)
    done = CliRunner().invoke(app, ["eval", str(folder), "--version", "0"])
    assert done.exit_code == 2
    assert "1 rollout worker(s) of the run are alive; stop them first" in done.stderr
    assert "evaluation.every_versions" in done.stderr and "store.session_ttl_seconds=30" in done.stderr
    assert not asyncio.run(is_paused(folder))


def test_a_run_scaled_to_no_generators_is_not_evaluated(folder: Path) -> None:
    printed("scale", str(folder), "generator=0")
    done = CliRunner().invoke(app, ["eval", str(folder)])
    assert done.exit_code == 2
    assert "generator=0 is requested with rollmesh scale" in done.stderr
    assert f"rollmesh scale {folder} generator=default" in done.stderr


async def leave_work(folder: Path, *, leases: int, claims: bool) -> None:
    """Leave what a worker of a killed run holds: trajectories, or the evaluation of version 1."""
    run = config(folder)
    async with running_store(run, RunFolder(folder)) as running:
        session = await running.store.sessions.open("killed worker")
        assert len(await running.store.trajectories.lease(session, leases)) == leases
        if claims:
            await running.store.evaluations.request(evaluation_request(run.evaluation, 1))
            assert await running.store.evaluations.claim(session) is not None


@pytest.mark.parametrize(("leases", "claims"), [(1, False), (0, True)], ids=["rollout", "evaluation"])
def test_a_run_that_was_killed_with_its_redis_is_not_evaluated_before_it_is_continued(
    folder: Path, leases: int, claims: bool
) -> None:
    """Only a trainer ends the recovery, so that no leader would take the work from the dead worker."""
    asyncio.run(leave_work(folder, leases=leases, claims=claims))
    embedded_server(config(folder), RunFolder(folder)).kill()
    for _ in range(2):  # a command that only looks stops the server cleanly
        printed("status", str(folder))
        done = CliRunner().invoke(app, ["eval", str(folder)])
        assert done.exit_code == 2
        assert f"continue the run once with rollmesh up {folder}/config.yaml, stop it, then evaluate" in done.stderr


def test_a_run_of_outside_agents_is_not_evaluated(folder: Path) -> None:
    values = config(folder).model_dump() | {"rollout": {"program": "agent"}}
    write_run_config(RunConfig.model_validate(values), folder / "config.yaml")
    done = CliRunner().invoke(app, ["eval", str(folder)])
    assert done.exit_code == 2
    assert "rollout.program=agent without rollout.agent.function: the agents are not part of the mesh" in done.stderr
