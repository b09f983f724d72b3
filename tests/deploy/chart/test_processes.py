"""The mesh of the manifests, run as processes of this machine: see pods.py for what is taken and what is mapped."""

import asyncio
import json
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from rollmesh.config.recipes import resolve_model
from rollmesh.config.store import StoreConfig
from rollmesh.store import TrajectoryStore

from ...kit.certificates import Authority
from ...kit.waiting import until
from .pod_mesh import DEADLINE_SECONDS, KIND, SECRETS, SMALL, machine_for, machine_of, start_all, versions, wait_until
from .pods import Machine, Pod, expanded, pods_of
from .rendering import CHART, RUN_FILES, Helm, Rendering

# Every deadline inside of a test passes first.
pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(1200)]


def services(pods: dict[str, list[Pod]]) -> Iterator[tuple[str, Pod]]:
    """Every (component, pod) that still runs when the trainer has ended."""
    return ((name, pod) for name, group in pods.items() if name not in ("redis", "trainer") for pod in group)


def test_the_manifests_run_as_processes_and_train(helm4: Helm, commands: str, tmp_path: Path) -> None:
    machine = machine_of(helm4, ["run.trainer.train_steps=3"], tmp_path, commands)
    with pods_of(machine, {"generator": 2}) as pods:
        start_all(pods)
        for component, pod in services(pods):
            wait_until(pods, lambda pod=pod: pod.passes("startupProbe"), f"{component} to start")
            wait_until(pods, lambda pod=pod: pod.passes("readinessProbe"), f"{component} to be ready")
        (trainer,) = pods["trainer"]
        wait_until(pods, lambda: trainer.exit_status is not None, "the trainer to end with its last step")
        assert versions(pods) == [0, 1, 2, 3]
        for component, pod in services(pods):
            assert f"rollmesh_{component}_build_info" in pod.get("admin", "/metrics").text
            # As a kubelet: a single probe may be over its time.
            wait_until(pods, lambda pod=pod: pod.passes("livenessProbe"), f"{pod.name} to be alive")
        assert "<html" in pods["gateway"][0].get("http", "/").text
        shared = machine.folder / "claims" / "demo-rollmesh-checkpoints" / "chart"
        assert len((shared / "run" / "metrics.jsonl").read_text().splitlines()) == 3
        status = json.loads(pods["rollout"][0].run("status", "/etc/rollmesh/run/run.yaml", "--json"))
        assert status, "commands find the run from within a pod"
        run_file = "/etc/rollmesh/run/run.yaml"
        # The commands of docs/cluster-results.md.
        pods["generator"][0].run("audit", run_file)
        pods["gateway"][0].run("report", run_file)
        assert (shared / "run" / "report.html").exists()
        pods["generator"][0].run("export", run_file, "/tmp/model")
        assert (machine.volume(pods["generator"][0].name, {"name": "tmp"}) / "model" / "config.json").exists()
        ended = {pod.name: pod.stop() for group in pods.values() for pod in group if pod.exit_status is None}
        assert set(ended.values()) == {0}, ended


def test_a_trainer_pod_that_is_drained_before_the_last_step_has_not_completed_its_job(
    helm4: Helm, commands: str, tmp_path: Path
) -> None:
    machine = machine_of(helm4, ["run.trainer.train_steps=40"], tmp_path, commands)
    with pods_of(machine, {}) as pods:
        start_all(pods)
        (trainer,) = pods["trainer"]
        wait_until(pods, lambda: trainer.passes("readinessProbe"), "the trainer to be ready")
        wait_until(pods, lambda: 1 in versions(pods), "the first train step")
        assert trainer.stop() not in (0, *final_statuses(machine.rendering, "trainer")), trainer.log[-4000:]


GUARDED = ["security.tls.enabled=true", "security.tls.certManager.issuerName=mesh", "security.token.enabled=true"]


TEACHER = ["run.teachers.twin.model=recipe:countdown", "run.trainer.algorithm.teacher.reverse_kl_coefficient=1"]
"""A teacher, without whose scores no step can be trained."""


def test_a_guarded_mesh_with_a_teacher_and_two_trainer_pods_trains(helm4: Helm, commands: str, tmp_path: Path) -> None:
    sets = ["run.trainer.train_steps=2", "trainer.nodes=2", "gateway.enabled=false", *GUARDED, *TEACHER]
    machine = machine_of(helm4, sets, tmp_path, commands)
    machine.secrets = {**SECRETS, **issued(machine, tmp_path)}
    with pods_of(machine, {"trainer": 2}) as pods:
        start_all(pods)
        for pod in [*pods["trainer"], *(pod for _, pod in services(pods))]:
            wait_until(pods, lambda pod=pod: pod.passes("startupProbe"), f"{pod.name} to start")
        wait_until(pods, lambda: all(p.exit_status is not None for p in pods["trainer"]), "the ranks to end")
        assert versions(pods) == [0, 1, 2]
        assert sum('"ranks": 2' in pod.log for pod in pods["trainer"]) == 1, "one of two ranks leads"
        (reward,) = pods["reward"]
        refused = httpx.get(f"https://{reward.address}:7071/metrics", verify=False, timeout=60)
        assert refused.status_code == 401, "metrics want a certificate or the token"


def issued(machine: Machine, folder: Path) -> dict[str, dict[str, str]]:
    """Write the Secrets of the Certificates as cert-manager would."""
    authority = Authority(folder / "authority")
    secrets = {}
    for wanted in machine.rendering.of_kind("Certificate"):
        made = authority.issue(wanted["spec"]["commonName"], tuple(wanted["spec"]["dnsNames"]))
        files = {"tls.crt": made.certificate, "tls.key": made.key, "ca.crt": made.ca}
        secrets[wanted["spec"]["secretName"]] = {name: file.read_text() for name, file in files.items()}
    return secrets


def test_a_wrong_run_file_stops_a_pod_before_its_service_starts(helm4: Helm, commands: str, tmp_path: Path) -> None:
    machine = machine_of(helm4, ["run.trainer.train_stepz=2"], tmp_path, commands)
    with pods_of(machine, {}) as pods:
        machine.folder.mkdir(parents=True)
        with pytest.raises(AssertionError, match=r"did you mean train_steps"):
            pods["rollout"][0].start()
        with pytest.raises(AssertionError, match=r"init container validate ended with (\d+)") as refused:
            pods["trainer"][0].start()
    status = int(re.search(r"validate ended with (\d+)", str(refused.value))[1])  # type: ignore[index]
    # A Job that can never start says so, instead of trying again for hours.
    assert status in final_statuses(machine.rendering, "validate")


def test_the_trainer_of_an_older_revision_gives_up_for_good_when_an_upgrade_has_stopped_half_way(
    helm4: Helm, commands: str, tmp_path: Path
) -> None:
    """Both Jobs are there, and the ConfigMap is the newer one's."""
    machine = machine_of(helm4, ["run.trainer.train_steps=100000"], tmp_path, commands)
    old = machine.rendering
    new = helm4.template(CHART, [KIND], [*SMALL, "run.trainer.train_steps=100000", "trainer.podAnnotations.a=b"])
    name, newest = (rendering.one("Job")["metadata"]["name"] for rendering in (old, new))
    with pods_of(machine, {"agents": 0, "gateway": 0}) as pods:
        start_all(pods)
        (older,) = pods.pop("trainer")
        try:
            wait_until(pods, lambda: 1 in versions(pods), "the first train step")
            machine.rendering = new
            pods["trainer"] = [Pod(machine, new.component("trainer"), f"{newest}-0")]
            pods["trainer"][0].start()
            wait_for_end(older)
            assert older.exit_status not in (0, *final_statuses(old, "trainer")), "a pod that was lost ends like this"
            with pytest.raises(AssertionError, match=rf"Job {name} ends: .* is Job {newest}") as refused:
                Pod(machine, old.component("trainer"), f"{name}-1").start()
        finally:
            older.kill()
        status = int(re.search(r"newest ended with (\d+)", str(refused.value))[1])  # type: ignore[index]
        assert status in final_statuses(old, "newest")
        trained = max(versions(pods))
        wait_until(pods, lambda: max(versions(pods)) > trained + 1, "the newer trainer to go on")


def final_statuses(rendering: Rendering, container: str) -> list[int]:
    """Exit statuses of a container of the trainer's Job after which the Job is not tried again."""
    rules = rendering.one("Job")["spec"]["podFailurePolicy"]["rules"]
    final = [rule["onExitCodes"] for rule in rules if rule["action"] == "FailJob"]
    return [s for codes in final if codes["containerName"] == container for s in codes["values"]]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_that_was_copied_in_part_is_final_for_the_job_whatever_the_number_of_ranks(
    helm4: Helm, commands: str, tmp_path: Path, ranks: int
) -> None:
    """Both the check of the run file and the trainer, which reads the weights, end the Job."""
    sets = ["run.model.path=/models/m", "model.existingClaim=models"]
    processes = [f"trainer.processesPerNode={ranks}", "trainer.maxRestarts=0"]
    machine = machine_of(helm4, [*sets, *processes], tmp_path, commands)
    model = machine.folder / "claims" / "models" / "m"
    shutil.copytree(resolve_model("recipe:countdown"), model)
    os.truncate(model / "model.safetensors", 500_000)
    with pods_of(machine, {}) as pods:
        (trainer,) = pods["trainer"]
        assert trainer.init_container_status("validate") in final_statuses(machine.rendering, "validate"), trainer.log
        assert "model.safetensors cannot be read" in trainer.log
        trainer.start_container()
        wait_for_end(trainer)
        assert trainer.exit_status in final_statuses(machine.rendering, "trainer"), trainer.log[-4000:]
        assert "model.path=/" in trainer.log


def wait_for_end(pod: Pod) -> None:
    """Wait until the container of a pod has ended, well or not."""
    until(lambda: pod.exit_status is not None, lambda: f"the end of {pod.name}\n{pod.log[-4000:]}", DEADLINE_SECONDS)


@pytest.mark.parametrize(("example", "sets"), RUN_FILES)
def test_the_init_containers_of_every_example_let_its_services_start(
    helm4: Helm, commands: str, tmp_path: Path, example: Path, sets: list[str]
) -> None:
    """In pods without SGLang, too; models and prompts of the right names lie in the claims."""
    machine = machine_for(helm4.template(CHART, [example], sets), tmp_path, commands)
    words = dict.fromkeys(("tls.crt", "tls.key", "ca.crt", "redis-password", "mesh-token"), "w" * 32)
    machine.secrets = defaultdict(lambda: words)
    run = yaml.safe_load(machine.rendering.one("ConfigMap", "-run")["data"]["run.yaml"])
    claims = machine.folder / "claims"
    if run["model"]["path"].startswith("/models/"):
        model = claims / run["model"]["path"].removeprefix("/")
        shutil.copytree(resolve_model("recipe:countdown"), model)
        # The models of the examples have more positions than the demo's: as many as the run file asks for.
        described = json.loads((model / "config.json").read_text())
        positions = max(described["max_position_embeddings"], run["generator"]["max_context_tokens"])
        (model / "config.json").write_text(json.dumps({**described, "max_position_embeddings": positions}))
        prompts = claims / "prompts" / Path(run["data"]["source"]["path"]).name
        prompts.parent.mkdir(parents=True)
        prompts.touch()
    with pods_of(machine, {}) as pods:
        for component in ("rollout", "generator", "reward"):
            pods[component][0].run_init_container("validate")


def test_references_are_expanded_as_kubernetes_does() -> None:
    assert expanded("$(A) $$(A) $(B) $$ $A", {"A": "1"}) == "1 $(A) $(B) $ $A"


def test_the_password_reaches_redis_whatever_it_is(helm4: Helm, commands: str, tmp_path: Path) -> None:
    machine = machine_of(helm4, [], tmp_path, commands)
    text = yaml.safe_dump(machine.rendering.component("redis"))
    assert SECRETS["rollmesh"]["redis-password"].rstrip() not in text


def test_redis_is_ready_with_a_password_that_ends_with_a_line_break(helm4: Helm, commands: str, tmp_path: Path) -> None:
    client = shutil.which("redis-cli")
    if client is None:
        pytest.skip("no redis-cli on PATH (apt-get install redis-tools)")
    with pods_of(machine_of(helm4, [], tmp_path, commands), {}) as pods:
        (redis,) = pods["redis"]
        redis.start()
        # All pods of this machine share the loopback address that the probe asks.
        command = tmp_path / "bin" / "redis-cli"
        command.write_text(f'#!/bin/sh\nexec {client} -h {redis.address} "$@"\n')
        command.chmod(0o755)
        wait_until({"redis": [redis]}, lambda: redis.passes("readinessProbe"), "the readiness probe")
        asyncio.run(connected(StoreConfig(password=SECRETS["rollmesh"]["redis-password"]), redis.address))


async def connected(config: StoreConfig, address: str) -> None:
    async with await TrajectoryStore.connect(config, "chart", f"redis://{address}:6379/0"):
        pass
