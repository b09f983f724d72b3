"""The values: closed, explained, refused with a reason, and what is generated from them up to date."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel, SecretStr

from rollmesh.config import RunConfig, load_run_config
from rollmesh.config.recipes import recipe_file

from .rendering import CHART, NAMESPACE, ROOT, RUN_FILES, Helm, HelmError

SGLANG = ["generator.sglang.sidecar.enabled=true", "run.generator.engine=sglang", "run.model.path=/models/m"]
KIND = CHART / "ci" / "kind-cpu-values.yaml"
NODES = "nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms"
EXTERNAL = ["redis.enabled=false", "redis.externalUrl=redis://host:6379"]
SIDECAR_GPU = r"generator.sglang.sidecar.resources.limits.nvidia\.com/gpu=1"
TEACHER = ["run.teachers.any.model=/models/m"]
GPU = r"resources.limits.nvidia\.com/gpu"


def test_what_is_generated_from_the_values_is_up_to_date() -> None:
    """The comment of every value begins with its name: the generator refuses anything else."""
    done = subprocess.run([sys.executable, ROOT / "helm" / "generate.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, f"run: python helm/generate.py\n{done.stdout}{done.stderr}"


def test_the_schema_is_closed_everywhere() -> None:
    def open_sections(schema: object, path: str = "") -> list[str]:
        found: list[str] = []
        if isinstance(schema, dict):
            # Fields of a run file's sections are the program's to know.
            inside_run = path.startswith("/properties/run/properties/")
            if schema.get("type") == "object" and "properties" in schema and not inside_run:
                found += [] if schema.get("additionalProperties") is False else [path]
            for key, value in schema.items():
                found += open_sections(value, f"{path}/{key}")
        return found

    assert open_sections(json.loads((CHART / "values.schema.json").read_text())) == []


@pytest.mark.parametrize(
    ("item", "complaint"),
    [
        ("generator.replica=3", "replica"),
        ("generator.replicas=many", "replicas"),
        ("generator.kind=DaemonSet", "kind"),
        ("rollout.image.tag=latest", "tag"),
        ("reward.autoscaling.kind=vpa", "kind"),
        ("run.network.grpc_port=1", "network"),
        ("run.launcher.rollout_replicas=2", "rollout_replicas"),
        ("run.trainers.train_steps=1", "trainers"),
        ("run.store.url=redis://elsewhere:6379", "url"),
        ("run.checkpoints.folder=/elsewhere", "folder"),
        ("run.reward.address=elsewhere:7070", "address"),
        ("run.gateway.port=81", "port"),
        ("run.gateway.enabled=false", "enabled"),
        ("run.generator.replicas=4", "replicas"),
        ("run.teachers.any.replicas=2", "replicas"),
        ("teachers.any.replica=2", "replica"),
        ("run.store.appendfsync=always", "appendfsync"),
        ("run.store.maxmemory_bytes=1073741824", "maxmemory_bytes"),
        ("run.evaluation.before_and_after=true", "before_and_after"),
        ("podSecurityContext.runAsUser=0", "runAsUser"),
        ("redis.externalUrl=redis://:password@host:6379", "externalUrl"),
        ("redis.externalUrl=redis://host:6379/0?db=1&password=word", "externalUrl"),
        ("redis.maxmemory=2Gi", "maxmemory"),
        ("checkpoints.url=ftp://host/path", "url"),
        ("checkpoints.accessModes={ReadWriteOncePod}", "accessModes"),
        ("keda.prometheusAddress=prometheus:9090", "prometheusAddress"),
        ("gateway.port=0", "port"),
        ("monitoring.prometheusRule.runbookUrl=git.example.org/runbooks", "runbookUrl"),
        ("run.name=Demo", "name"),
        ("checkpoints.size=500", "size"),
        ("checkpoints.size=500m", "size"),
        ("redis.persistence.size=4", "size"),
        ("redis.maxmemory=256", "maxmemory"),
        ("imageRegistry=https://registry.example.org", "imageRegistry"),
        ("trainer.sharedMemory=16", "sharedMemory"),
        ("reward.resources.limits.memory=512", "memory"),
        ("reward.resources.limits.memory=512m", "memory"),
        ("imagePullSecrets={registry}", "imagePullSecrets"),
        ("rollout.extraEnv[0].name=A,rollout.extraEnv[0].value=1", "value"),
        ("networkPolicy.gatewayFrom[0].podSelector.matchLabels.team=7", "team"),
        ("generator.extraVolumes[0].name=a,generator.extraVolumes[0].csi.volumeAttributes.size=7", "size"),
        (f"generator.affinity.{NODES}[0].matchExpressions[0].values[0]=7", "values"),
        ("generator.sglang.sidecar.extraEnv[0].name=A,generator.sglang.sidecar.extraEnv[0].value=true", "value"),
    ],
)
def test_a_wrong_value_is_refused_with_its_name(helm: Helm, item: str, complaint: str) -> None:
    with pytest.raises(HelmError, match=complaint):
        helm.template(CHART, [KIND], [item])


def test_a_size_in_bytes_is_taken_where_it_is_one(helm: Helm) -> None:
    sets = ["checkpoints.size=500Gi", "redis.maxmemory=268435456b", "reward.resources.limits.memory=1073741824"]
    rendering = helm.template(CHART, [KIND], sets)
    assert rendering.one("PersistentVolumeClaim")["spec"]["resources"]["requests"]["storage"] == "500Gi"


def test_values_for_schedulers_registries_and_injectors_reach_the_trainer_alone(helm: Helm) -> None:
    queue = {"kueue.x-k8s.io/queue-name": "team"}
    sets = [
        "trainer.schedulerName=volcano",
        r"trainer.labels.kueue\.x-k8s\.io/queue-name=team",
        "trainer.automountServiceAccountToken=true",
        "imagePullSecrets[0].name=registry",
    ]
    rendering = helm.template(CHART, [KIND], sets)
    job = rendering.one("Job")
    assert job["metadata"]["labels"].items() >= queue.items()
    assert not job["spec"]["template"]["metadata"]["labels"].items() >= queue.items(), "the Job is queued, no pod"
    for _, template in rendering.pods():
        trainer = template["metadata"]["labels"]["app.kubernetes.io/component"] == "trainer"
        spec = template["spec"]
        assert spec["imagePullSecrets"] == [{"name": "registry"}]
        assert spec.get("schedulerName") == ("volcano" if trainer else None)
        assert spec["automountServiceAccountToken"] is trainer


def test_no_monitoring_peer_at_all_is_refused_because_a_policy_would_then_admit_everyone(
    helm: Helm, tmp_path: Path
) -> None:
    file = tmp_path / "values.yaml"
    file.write_text("networkPolicy: {monitoringFrom: []}")
    with pytest.raises(HelmError, match="monitoringFrom"):
        helm.template(CHART, [KIND, file])


def secret_fields(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted paths of the secrets of a run file."""
    for name, field in model.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)):
            if kind is SecretStr:
                yield f"{prefix}{name}"
            elif get_origin(field.annotation) is dict and isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from secret_fields(kind, f"{prefix}{name}.any.")
            elif isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from secret_fields(kind, f"{prefix}{name}.")


def test_no_secret_of_a_run_file_can_get_into_the_config_map(helm4: Helm) -> None:
    found = list(secret_fields(RunConfig))
    assert {
        "store.password",
        "checkpoints.secret",
        "generator.sglang.admin_key",
        "teachers.any.sglang.admin_key",
    } <= set(found)
    for path in found:
        with pytest.raises(HelmError, match=r"don.t meet the specifications"):
            helm4.template(CHART, [KIND], [f"run.{path}={'a' * 40}"])


@pytest.mark.parametrize(
    ("items", "complaint"),
    [
        (["secrets.create=false", "secrets.existingSecret="], "secrets.existingSecret is empty"),
        (["redis.enabled=false"], "redis.externalUrl is empty"),
        (["generator.kind=LeaderWorkerSet"], "run.generator.engine=sglang"),
        (["generator.autoscaling.kind=keda"], "keda.prometheusAddress is empty"),
        (["gateway.ingress.enabled=true"], "gateway.ingress.host is empty"),
        (["security.tls.enabled=true"], "existingSecret or certManager.issuerName"),
        (["checkpoints.url=s3://a/b", "generator.kind=LeaderWorkerSet", *SGLANG], "needs a checkpoint volume"),
        (["checkpoints.url=s3://a/b", "trainer.nodes=2"], "needs a checkpoint volume"),
        (["trainer.nodes=2", "run.trainer.optimizer=adamw_8bit"], r"trainer\.nodes=2 .*=adamw_8bit"),
        (["trainer.processesPerNode=2", "run.trainer.optimizer=adamw_8bit"], r"processesPerNode=2 .*=adamw_8bit"),
        (["generator.sglang.sidecar.enabled=true", "run.generator.engine=sglang"], "model.existingClaim"),
        (["redis.externalUrl=redis://host:6379"], r"redis\.externalUrl=redis://host:6379 with redis\.enabled=true"),
        (["redis.clientCertificate=true"], r"redis\.clientCertificate=true has no effect without redis\.tlsSecret"),
        (["redis.tlsSecret=a"], r"redis\.tlsSecret=a has no effect without a redis\.externalUrl"),
        ([*EXTERNAL, "redis.tlsSecret=a"], r"tlsSecret=a .* that begins with rediss"),
        ([*EXTERNAL, "redis.externalSentinelPassword=true"], r"SentinelPassword=true has .* \+sentinel"),
        ([*EXTERNAL, "redis.extraConfig=hz 20"], r"extraConfig=hz 20 has no effect"),
        (["checkpoints.cacheVolume.hostPath.path=/cache"], r"cacheVolume.* has no effect without checkpoints\.url"),
        (["checkpoints.existingClaim=c", "checkpoints.storageClassName=fast"], "storageClassName=fast has no effect"),
        (["gateway.enabled=false", "gateway.ingress.enabled=true"], r"no effect without gateway\.enabled"),
        (["gateway.enabled=false", "gateway.httpRoute.enabled=true"], r"no effect without gateway\.enabled"),
        (["network.adminPort=7070"], r"network\.grpcPort=7070 is the port of network\.adminPort"),
        (["gateway.port=7071"], r"gateway\.port=7071 is the port"),
        (["trainer.rendezvousPort=7071"], r"trainer\.rendezvousPort=7071 is the port"),
        (["generator.sglang.sidecar.port=7070"], r"sidecar\.port=7070 is the port of network\.grpcPort"),
        (["redis.maxmemory=600mb"], r"limits\.memory=512Mi has no room for redis\.maxmemory=600mb"),
        (["redis.maxmemory=512mb"], r"limits\.memory=512Mi has no room"),
        (["redis.maxmemory=2g", "redis.resources.limits.memory=4G"], r"persistence\.size=1Gi has no room"),
        (["checkpoints.url=s3://a/b", "checkpoints.existingClaim=c"], "checkpoints have one place"),
        (["generator.sglang.sidecar.enabled=true"], r"no effect without run\.generator\.engine=sglang"),
        (["security.tls.existingSecret=a", "security.tls.certManager.issuerName=b"], "certificates come from one"),
        (["monitoring.podMonitor.enabled=true", "monitoring.serviceMonitor.enabled=true"], "sums would double"),
        (["trainer.processesPerNode=4", f"trainer.{GPU}=1"], r"processesPerNode=4 with 1 GPUs in trainer\.resources"),
        ([f"trainer.{GPU}=8"], r"processesPerNode=1 with 8 GPUs"),
        ([r"trainer.resources.limits.amd\.com/gpu=2"], r"processesPerNode=1 with 2 GPUs"),
        ([r"trainer.resources.limits.nvidia\.com/mig-1g\.10gb=2", "trainer.processesPerNode=4"], "=4 with 2 GPUs"),
        (["generator.autoscaling.maxReplicas=9"], r"generator\.autoscaling\.maxReplicas=9 without its kind"),
        (["teachers.any.replicas=2"], r"teachers\.any has no effect without a teacher run\.teachers\.any"),
        ([*TEACHER, "run.teachers.any.address=far:7070", "teachers.any.replicas=2"], r"that has no address"),
        (["run.teachers.a_b.model=/models/m"], r"called demo-rollmesh-teacher-a_b: up to 63"),
        ([f"run.teachers.{'a' * 50}.model=/models/m"], r"aa: up to 63"),
        ([*TEACHER, "teachers.any.autoscaling.maxReplicas=9"], r"teacher-any\.autoscaling\.maxReplicas=9 without its"),
        (
            ["reward.autoscaling.kind=hpa", "reward.autoscaling.minReplicas=99"],
            r"reward\.autoscaling\.minReplicas=99 is",
        ),
        (
            [*SGLANG, "model.existingClaim=m", "generator.sglang.sidecar.args={--tp-size=2}", SIDECAR_GPU],
            "--tp-size=2 with 1",
        ),
    ],
)
def test_values_that_do_not_work_together_say_what_is_missing(helm4: Helm, items: list[str], complaint: str) -> None:
    with pytest.raises(HelmError, match=complaint):
        helm4.template(CHART, [KIND], items)


def test_a_flag_of_two_words_asks_for_gpus_as_one_of_one_word_does(helm: Helm, tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text('generator: {sglang: {sidecar: {args: [--tp, "4"]}}}')
    values = [*SGLANG, "model.existingClaim=m"]
    with pytest.raises(HelmError, match="--tp 4 with 1 GPUs"):
        helm.template(CHART, [KIND, file], [*values, SIDECAR_GPU])
    helm.template(CHART, [KIND, file], [*values, SIDECAR_GPU.replace("=1", "=4")])


def test_several_pods_may_hold_sessions_and_reach_each_other(helm: Helm) -> None:
    needed = ["run.rollout.program=agent", "agents.enabled=false"]  # deployed all the same
    ours = "networkPolicy.agentsFrom[0].podSelector.matchLabels.app=tools"
    rendering = helm.template(CHART, [KIND], [*needed, "agents.replicas=3", "networkPolicy.enabled=true", ours])
    agents = rendering.one("Deployment", "-agents")["spec"]
    assert (agents["replicas"], "strategy" in agents) == (3, False)
    (container,) = agents["template"]["spec"]["containers"]
    (address,) = [e for e in container["env"] if e["name"] == "ROLLMESH_NETWORK__ADVERTISE_HOST"]
    assert address["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
    (port,) = [p["containerPort"] for p in container["ports"] if p["name"] == "http"]
    (calls, _) = rendering.one("NetworkPolicy", "-agents")["spec"]["ingress"]
    tools, pods = (peer["podSelector"]["matchLabels"] for peer in calls["from"])
    assert (tools, calls["ports"]) == ({"app": "tools"}, [{"port": port, "protocol": "TCP"}])
    assert (
        pods == agents["selector"]["matchLabels"] and pods.items() <= agents["template"]["metadata"]["labels"].items()
    )


@pytest.mark.parametrize(("example", "sets"), RUN_FILES)
def test_run_file_and_environment_of_every_container_make_a_run(
    helm4: Helm, example: Path, sets: list[str], tmp_path: Path
) -> None:
    rendering = helm4.template(CHART, [example], sets)
    file = tmp_path / "run.yaml"
    file.write_text(rendering.one("ConfigMap", "-run")["data"]["run.yaml"])
    ours = ("rollout", "generator", "reward", "teacher", "trainer", "gateway", "agents", "validate")
    seen = 0
    for name, _, container in rendering.containers():
        if container["name"] in ours:
            # What comes by reference is known to the cluster alone; a word stands for it.
            environ = {e["name"]: e.get("value", "a-word-of-32-letters-and-figures") for e in container["env"]}
            config = load_run_config(file, environ=environ)
            assert config.network.shared_folder is False and config.network.admin_port == 7071, name
            assert config.folder.startswith("/var/lib/rollmesh/"), name
            seen += 1
    values = yaml.safe_load(example.read_text())
    here = [teacher for teacher in values["run"].get("teachers", {}).values() if "address" not in teacher]
    assert seen == 2 * (5 + ("agents" in values) + len(here)), "every service and its init container"


def test_a_run_in_the_values_is_the_whole_run_file(helm: Helm, tmp_path: Path) -> None:
    """Helm merges maps, so a default of the chart would be a field of every run file."""
    run = {"name": "mine", "model": {"path": "recipe:countdown"}, "schedule": {"preset": "roll"}}
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump({"run": run}))
    written = yaml.safe_load(helm.template(CHART, [file]).one("ConfigMap", "-run")["data"]["run.yaml"])
    assert written == {**run, "folder": "/var/lib/rollmesh/run"}


def test_fields_of_the_launcher_that_services_read_reach_the_run_file(helm: Helm) -> None:
    fields = {"torch_threads": 4, "start_timeout_seconds": 900}
    sets = [f"run.launcher.{name}={value}" for name, value in fields.items()]
    written = yaml.safe_load(helm.template(CHART, [KIND], sets).one("ConfigMap", "-run")["data"]["run.yaml"])
    assert written["launcher"] == fields


def test_no_run_in_the_values_is_the_demo(helm: Helm) -> None:
    written = yaml.safe_load(helm.template(CHART).one("ConfigMap", "-run")["data"]["run.yaml"])
    demo = yaml.safe_load(recipe_file("countdown", "demo.yaml").read_text())
    assert written["name"] == demo["name"]
    for section, fields in written.items():
        if isinstance(fields, dict):
            shared = {name: demo[section].get(name, value) for name, value in fields.items()}
            assert fields == shared, section


@pytest.mark.parametrize("missing", ["name", "model"])
def test_a_part_of_a_run_file_is_refused_with_what_it_lacks(helm: Helm, missing: str) -> None:
    sets = {"name": "run.name=mine", "model": "run.model.path=recipe:countdown"}
    others = [item for field, item in sets.items() if field != missing]
    with pytest.raises(HelmError, match=rf"run\.{missing} is missing: .*countdown-cpu-values"):
        helm.template(CHART, (), ["run.trainer.train_steps=10", *others])


def test_large_and_small_numbers_reach_the_run_file_as_they_are(helm: Helm, tmp_path: Path) -> None:
    sets = ["run.generator.kv_token_capacity=12884901888", "run.trainer.learning_rate=0.0000004", "run.seed=20000000"]
    file = tmp_path / "run.yaml"
    file.write_text(helm.template(CHART, [KIND], sets).one("ConfigMap", "-run")["data"]["run.yaml"])
    config = load_run_config(file, environ={})
    assert config.generator.kv_token_capacity == 12_884_901_888
    assert config.trainer.learning_rate == 4e-7
    assert config.seed == 20_000_000


def test_a_changed_run_file_makes_new_pods_and_another_trainer_job(helm4: Helm) -> None:
    before, same, after = (
        helm4.template(CHART, [KIND], sets)
        for sets in ([], ["gateway.service.port=81"], ["run.trainer.train_steps=41"])
    )
    assert before.one("Job")["metadata"]["name"] == same.one("Job")["metadata"]["name"]
    assert before.one("Job")["metadata"]["name"] != after.one("Job")["metadata"]["name"]
    mark = "rollmesh/run-file"
    for component in ("rollout", "generator", "reward", "gateway", "agents"):
        old, new = (r.component(component)["metadata"]["annotations"][mark] for r in (before, after))
        assert old != new


def test_every_teacher_has_values_of_its_own_over_those_of_all(helm: Helm) -> None:
    sets = ["run.teachers.law.model=/models/law", "run.teachers.code.model=/models/code", "teacher.replicas=2"]
    own = ["teachers.law.replicas=3", rf"teachers.law.{GPU}=1", "teacher.resources.requests.memory=40000000000"]
    rendering = helm.template(CHART, [KIND], [*sets, "run.teachers.far.address=far:7070", *own])
    law, code = (rendering.one("Deployment", f"-teacher-{name}")["spec"] for name in ("law", "code"))
    assert (law["replicas"], code["replicas"]) == (3, 2)
    (container,), (other,) = (spec["template"]["spec"]["containers"] for spec in (law, code))
    assert container["args"] == ["teacher", "/etc/rollmesh/run/run.yaml", "law"]
    assert other["resources"] == {"requests": {"memory": 40000000000}}
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 1}, **other["resources"]}
    run = yaml.safe_load(rendering.one("ConfigMap", "-run")["data"]["run.yaml"])
    found = {name: teacher["address"] for name, teacher in run["teachers"].items()}
    assert found == {"far": "far:7070", **{n: f"demo-rollmesh-teacher-{n}:7070" for n in ("law", "code")}}
    assert {s["metadata"]["name"] for s in rendering.of_kind("Service")} >= {
        f"demo-rollmesh-teacher-{n}" for n in ("law", "code")
    }


def test_names_stay_valid_for_long_releases(helm4: Helm) -> None:
    long = helm4.template(CHART, [KIND], ["fullnameOverride=a-release-with-a-rather-long-name-that-goes-on-and-on"])
    assert all(len(thing["metadata"]["name"]) <= 63 for thing in long.objects)


def test_services_can_be_left_out(helm4: Helm) -> None:
    parts = ("rollout", "generator", "reward", "trainer", "gateway", "agents", "redis")
    sets = [f"{part}.enabled=false" for part in parts] + ["redis.externalUrl=redis://elsewhere:6379"]
    assert not list(helm4.template(CHART, [KIND], sets).pods())


def test_the_notes_name_things_that_exist(helm4: Helm) -> None:
    notes = helm4.notes(CHART, [KIND])  # Helm 3 asks a cluster for this
    rendering = helm4.template(CHART, [KIND])
    assert f"service/{rendering.one('Service', '-gateway')['metadata']['name']} 8080:80" in notes
    assert f"http://{rendering.one('Service', '-agents')['metadata']['name']}.{NAMESPACE}:80/v1" in notes
    assert f"deployment/{rendering.one('Deployment', '-generator')['metadata']['name']} --replicas=3" in notes
    assert "helm upgrade --force-conflicts" in notes, "for a changed value of replicas over a number of kubectl"
    assert f"claim {rendering.one('PersistentVolumeClaim')['metadata']['name']}" in notes
