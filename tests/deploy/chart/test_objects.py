"""Checks of rendered objects beyond the schemas, and the settings of each service."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousTimeout

from .api_server import installed, owned
from .object_checks import all_checks
from .rendering import CHART, NAMESPACE, ROOT, Helm, Object, Rendering

CHECKS = all_checks()
KIND = CHART / "ci" / "kind-cpu-values.yaml"


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_every_example(renderings: list[Rendering], check: Callable[[Rendering], Iterator[str]]) -> None:
    problems = [f"{rendering.name}: {problem}" for rendering in renderings for problem in check(rendering)]
    assert not problems, "\n".join(problems)


def variables(template: Object) -> dict[str, Any]:
    """Environment of all containers of a pod."""
    containers = [*template["spec"].get("initContainers", []), *template["spec"]["containers"]]
    return {entry["name"]: entry for c in containers for entry in c.get("env", [])}


def test_reward_pods_have_no_credentials_and_no_checkpoints(renderings: list[Rendering]) -> None:
    for rendering in renderings:
        pod = rendering.component("reward")
        assert not [n for n, e in variables(pod).items() if "secretKeyRef" in e.get("valueFrom", {})], rendering.name
        assert not [v["name"] for v in pod["spec"]["volumes"] if v["name"] in ("shared", "redis-tls")], rendering.name
        (policy,) = [p for p in rendering.of_kind("NetworkPolicy") if p["metadata"]["name"].endswith("-reward")]
        assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]


def test_generators_cannot_write_checkpoints_to_the_shared_volume(renderings: list[Rendering]) -> None:
    seen = 0
    for rendering in renderings:
        for name, template, container in rendering.containers():
            component = template["metadata"]["labels"]["app.kubernetes.io/component"]
            for mount in container["volumeMounts"]:
                if mount["name"] == "shared":
                    assert mount.get("readOnly", False) is component.startswith("generator"), f"{rendering.name} {name}"
                    seen += 1
    assert seen > 10


def test_secrets_come_by_reference_only(renderings: list[Rendering]) -> None:
    for rendering in renderings:
        assert not rendering.of_kind("Secret")
        for name, _, container in rendering.containers():
            for entry in container.get("env", []):
                if entry["name"].endswith(("PASSWORD", "SECRET", "TOKEN", "_KEY")) and "TLS" not in entry["name"]:
                    assert set(entry["valueFrom"]) == {"secretKeyRef"}, (name, entry)


def test_the_ranks_of_a_trainer_meet_at_its_first_pod(renderings: list[Rendering]) -> None:
    (spot,) = [r for r in renderings if r.name.startswith("spot-32")]
    job = spot.one("Job")
    env = variables(spot.component("trainer"))
    first = f"{job['metadata']['name']}-0"  # the host name that Kubernetes gives to the pod with index 0
    service = spot.one("Service", first)
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == int(env["PET_NNODES"]["value"]) == 2
    assert env["PET_RDZV_ENDPOINT"]["value"] == f"{first}:{service['spec']['ports'][0]['port']}"
    assert service["spec"]["selector"]["batch.kubernetes.io/job-completion-index"] == "0"
    assert service["spec"]["selector"]["batch.kubernetes.io/job-name"] == job["metadata"]["name"]
    assert service["spec"]["publishNotReadyAddresses"] is True and service["spec"]["clusterIP"] == "None"
    assert len(first) <= 63


@pytest.mark.parametrize("period", [7, 10])
def test_trainer_pods_pass_their_liveness_probe_while_torchrun_waits_for_one_that_is_replaced(
    helm4: Helm, period: int
) -> None:
    def seconds(nodes: int, component: str) -> int:
        sets = [f"trainer.nodes={nodes}", f"{component}.probes.periodSeconds={period}"]
        (container,) = helm4.template(CHART, [KIND], sets).component(component)["spec"]["containers"]
        return int(container["livenessProbe"]["failureThreshold"] * container["livenessProbe"]["periodSeconds"])

    wait = RendezvousTimeout().join.total_seconds()
    assert seconds(2, "trainer") >= seconds(1, "trainer") + wait
    assert seconds(2, "reward") == seconds(1, "reward")


def test_autoscaled_workloads_leave_their_replicas_to_the_autoscaler(renderings: list[Rendering]) -> None:
    seen = 0
    for rendering in renderings:
        for scaler in rendering.of_kind("HorizontalPodAutoscaler", "ScaledObject"):
            target = scaler["spec"]["scaleTargetRef"]
            (workload,) = [w for w in rendering.of_kind(target["kind"]) if w["metadata"]["name"] == target["name"]]
            assert "replicas" not in workload["spec"]
            seen += 1
    assert seen >= 5


SITUATIONS = {
    "deployments": ["agents.enabled=true"],
    "statefulsets": ["generator.kind=StatefulSet", "trainer.kind=StatefulSet"],
    "leaderworkerset": [
        "generator.kind=LeaderWorkerSet", "generator.sglang.sidecar.enabled=true", "model.existingClaim=models",
        "run.name=big", "run.generator.engine=sglang", "run.model.path=/models/m",
    ],
}  # fmt: skip
"""Values with which every kind of workload is there that `kubectl scale` takes."""
SCALABLE = ("Deployment", "StatefulSet", "LeaderWorkerSet")


def scaled(rendering: Rendering, replicas: int) -> dict[str, Object]:
    """Return the workloads as the API server has them once someone else has set their replicas, by their paths."""
    found = {}
    for workload in rendering.of_kind(*SCALABLE):
        path = f"/apis/{workload['apiVersion']}/namespaces/{NAMESPACE}/{workload['kind'].lower()}s"
        stored = owned({**workload, "spec": {**workload["spec"], "replicas": replicas}})
        found[f"{path}/{workload['metadata']['name']}"] = stored
    return found


def replicas_of(rendering: Rendering) -> dict[str, int | None]:
    """Return the replicas of every workload, None where they are left to the cluster, where a value says how many."""
    workloads = [w for w in rendering.of_kind(*SCALABLE) if not w["metadata"]["name"].endswith(("-redis", "-trainer"))]
    return {workload["metadata"]["name"]: workload["spec"].get("replicas") for workload in workloads}


@pytest.mark.parametrize("sets", SITUATIONS.values(), ids=SITUATIONS)
def test_an_upgrade_keeps_the_replicas_that_someone_else_has_set_unless_the_value_changes(
    helm: Helm, sets: list[str]
) -> None:
    """With the number of the values Helm 4 stops half-way at a conflict with kubectl, and Helm 3 takes it back."""
    components = ("rollout", "generator", "reward", "gateway", "agents")
    three = [*sets, *(f"{component}.replicas=3" for component in components)]
    first = installed(helm, {}, *sets)
    up = installed(helm, scaled(first, 5), *sets, "gateway.service.port=81")
    down = installed(helm, scaled(up, 0), *sets)
    changed = installed(helm, scaled(down, 7), *three)
    again = installed(helm, scaled(changed, 6), *three)
    back = installed(helm, scaled(again, 6), *sets)
    steps = [set(replicas_of(rendering).values()) for rendering in (first, up, down, changed, again, back)]
    assert steps == [{1}, {5}, {0}, {3}, {6}, {1}]
    everything = [workload["spec"]["replicas"] for workload in up.of_kind(*SCALABLE)]
    assert set(everything) == {5} and len(everything) > len(replicas_of(up)), "those without a value, too"


@pytest.mark.parametrize("kind", ["Deployment", "StatefulSet"])
def test_an_upgrade_keeps_the_replicas_that_an_autoscaler_has_set(helm: Helm, kind: str) -> None:
    """Helm removes a field that the new manifest no longer has, and Kubernetes then sets replicas to 1."""
    plain = [f"generator.kind={kind}", "gateway.enabled=false"]
    sets = [*plain, *(f"{component}.autoscaling.kind=hpa" for component in ("rollout", "reward", "generator"))]
    first = installed(helm, {}, *sets)
    up = installed(helm, scaled(first, 5), *sets)
    down = installed(helm, scaled(up, 0), *sets)
    without = installed(helm, scaled(down, 4), *plain)
    steps = [set(replicas_of(rendering).values()) for rendering in (first, up, down, without)]
    assert steps == [{None}, {5}, {0}, {4}], "turning it off is no reason to scale"


def test_with_certificates_probes_ask_the_admin_port_over_tls(renderings: list[Rendering]) -> None:
    (spot,) = [r for r in renderings if r.name.startswith("spot-32")]
    for name, _, container in spot.containers():
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            asked = container.get(probe, {})
            assert "grpc" not in asked, name
            assert asked.get("httpGet", {"scheme": "HTTPS"})["scheme"] == "HTTPS", name
    for certificate in spot.of_kind("Certificate"):
        assert certificate["spec"]["dnsNames"] == [
            variables(spot.component("rollout"))["ROLLMESH_SECURITY__TLS__SERVER_NAME"]["value"]
        ]


def test_autoscalers_ask_for_metrics_that_exist(renderings: list[Rendering]) -> None:
    """prometheus-adapter makes what HPAs name; queries of ScaledObjects name one run, completely."""
    rules = yaml.safe_load((CHART / "files" / "prometheus-adapter" / "rules.yaml").read_text())["rules"]["external"]
    made = {rule["name"]["as"] for rule in rules}
    asked = set()
    for rendering in renderings:
        for scaler in rendering.of_kind("HorizontalPodAutoscaler"):
            asked |= {metric["external"]["metric"]["name"] for metric in scaler["spec"]["metrics"]}
        for scaler in rendering.of_kind("ScaledObject"):
            for trigger in scaler["spec"]["triggers"]:
                query = trigger["metadata"]["query"]
                assert "$" not in query and 'run="code-7b"' in query and f'namespace="{NAMESPACE}"' in query, query
    assert asked == made, "an example uses every signal"
    assert all("<<.LabelMatchers>>" in rule["metricsQuery"] and "$" not in rule["metricsQuery"] for rule in rules)


def test_rules_and_dashboards_are_the_files_of_the_chart(renderings: list[Rendering]) -> None:
    """A cluster gets the files that promtool and the tests of the dashboards check."""
    (spot,) = [r for r in renderings if r.name.startswith("spot-32")]
    for file in (CHART / "files" / "prometheus").glob("*.yaml"):
        assert spot.one("PrometheusRule", f"-{file.stem}")["spec"] == yaml.safe_load(file.read_text()), file.name
    for file in (CHART / "files" / "dashboards").glob("*.json"):
        config_map = spot.one("ConfigMap", f"-dashboard-{file.stem}")
        assert json.loads(config_map["data"][file.name]) == json.loads(file.read_text()), file.name
        assert config_map["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_every_alert_leads_to_its_runbook(helm4: Helm) -> None:
    """An operator follows the link of an alert: with monitoring.prometheusRule.runbookUrl that is an address."""
    example, url = CHART / "ci" / "kind-cpu-values.yaml", "https://git.example.org/ml/rollmesh/docs/runbooks"
    turned_on = ["monitoring.prometheusRule.enabled=true"]
    for start, sets in ((url, [f"monitoring.prometheusRule.runbookUrl={url}/"]), ("docs/runbooks", [])):
        rules = helm4.template(CHART, [example], [*turned_on, *sets]).one("PrometheusRule", "-alerts")
        alerts = [rule for group in rules["spec"]["groups"] for rule in group["rules"]]
        assert len(alerts) > 30
        for alert in alerts:
            page, _, anchor = alert["annotations"]["runbook_url"].removeprefix(f"{start}/").partition("#")
            assert anchor == alert["alert"].lower()
            assert f"\n## {alert['alert']}\n" in (ROOT / "docs" / "runbooks" / page).read_text()


def test_prometheus_comes_through_every_policy(renderings: list[Rendering]) -> None:
    """Each pod that a monitor selects may be scraped on the port it names, and reward pods may ask DNS."""
    seen = 0
    for rendering in renderings:
        policies = {p["metadata"]["name"]: p["spec"] for p in rendering.of_kind("NetworkPolicy")}
        for name, template in rendering.pods():
            ports = {p["name"]: p["containerPort"] for c in template["spec"]["containers"] for p in c.get("ports", [])}
            if "admin" not in ports:
                continue
            labels = template["metadata"]["labels"]
            (policy,) = [p for p in policies.values() if p["podSelector"]["matchLabels"].items() <= labels.items()]
            rule = {"from": [{"namespaceSelector": {}}], "ports": [{"port": ports["admin"], "protocol": "TCP"}]}
            assert rule in policy["ingress"], f"{rendering.name} {name}"
            seen += 1
            if "Egress" in policy["policyTypes"]:
                asked = [(port["port"], port["protocol"]) for rule in policy["egress"] for port in rule["ports"]]
                assert set(asked) >= {(53, "UDP"), (53, "TCP")}, name
    names = [d["metadata"]["name"] for r in renderings for d in r.of_kind("Deployment")]
    agents, teachers = (sum(part in name for name in names) for part in ("-agents", "-teacher-"))
    assert seen == 5 * len(renderings) + agents + teachers
    assert (agents, teachers) == (2, 3)


def test_every_caller_of_a_service_passes_its_network_policy(renderings: list[Rendering]) -> None:
    """Only pods with the password of Redis or the address of the reward service may connect there."""
    component = "app.kubernetes.io/component"
    for rendering in renderings:
        for callee, variable in (("redis", "ROLLMESH_STORE__PASSWORD"), ("reward", "ROLLMESH_REWARD__ADDRESS")):
            callers = {t["metadata"]["labels"][component] for _, t in rendering.pods() if variable in variables(t)}
            policies = [p for p in rendering.of_kind("NetworkPolicy") if p["metadata"]["name"].endswith(callee)]
            for policy in policies:
                peers = policy["spec"]["ingress"][0]["from"]
                assert {p["podSelector"]["matchLabels"][component] for p in peers} == callers, rendering.name
        assert policies, "reward pods have a policy everywhere"
        rewards, *others = (
            p
            for p in rendering.of_kind("NetworkPolicy")
            if "-reward" in p["metadata"]["name"] or "-teacher-" in p["metadata"]["name"]
        )
        for policy in others:
            assert policy["spec"]["ingress"] == rewards["spec"]["ingress"], "teachers have the callers of rewards"
