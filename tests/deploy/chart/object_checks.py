"""Checks beyond the schemas: each yields the problems of one rendering."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import yaml

from .rendering import Object, Rendering

_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?")
_PORT_NAME = re.compile(r"(?=.*[a-z])[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|[kMGTPE]|[KMGTPE]i)?")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_GIVEN_CLAIMS = frozenset({"models", "prompts"})
_GIVEN_SECRETS = frozenset({"rollmesh", "redis-tls", "mesh-tls", "prometheus-mesh-tls"})
_CHECKS: list[Callable[[Rendering], Iterator[str]]] = []


def check(function: Callable[[Rendering], Iterator[str]]) -> Callable[[Rendering], Iterator[str]]:
    """Register a check."""
    _CHECKS.append(function)
    return function


def all_checks() -> list[Callable[[Rendering], Iterator[str]]]:
    """Every check."""
    return list(_CHECKS)


SET_BY_CONTROLLERS = frozenset(
    {"batch.kubernetes.io/job-name", "batch.kubernetes.io/job-completion-index", "apps.kubernetes.io/pod-index"}
)


def _matches(selector: Object, labels: Object) -> bool:
    return all(labels.get(key) == value for key, value in selector.items() if key not in SET_BY_CONTROLLERS)


@check
def names_and_labels_are_valid(rendering: Rendering) -> Iterator[str]:
    """DNS names, lengths, unique per kind, no namespace, the recommended labels everywhere."""
    seen: set[tuple[str, str]] = set()
    for thing in rendering.objects:
        kind, metadata = thing["kind"], thing["metadata"]
        name = metadata["name"]
        limit = 63 if kind in ("Service", "Job", "StatefulSet", "Deployment", "LeaderWorkerSet") else 253
        if not _NAME.fullmatch(name) or len(name) > limit:
            yield f"{kind}/{name}: no valid name"
        if (kind, name) in seen:
            yield f"{kind}/{name}: twice"
        seen.add((kind, name))
        if "namespace" in metadata:
            yield f"{kind}/{name}: names a namespace"
        for label in ("name", "instance", "version", "component", "managed-by"):
            if f"app.kubernetes.io/{label}" not in metadata["labels"]:
                yield f"{kind}/{name}: lacks the label {label}"
    every = [(t["metadata"]["name"], t["metadata"]["labels"]) for t in rendering.objects]
    every += [(name, template["metadata"]["labels"]) for name, template in rendering.pods()]
    for name, labels in every:
        for key, value in labels.items():
            if not isinstance(value, str) or len(value) > 63 or not _LABEL_VALUE.fullmatch(value):
                yield f"{name}: label {key}={value!r}"


@check
def selectors_match_pods(rendering: Rendering) -> Iterator[str]:
    """Workloads select their own pods and no others; Services, budgets and policies select some."""
    pods = [(name, template["metadata"]["labels"]) for name, template in rendering.pods()]
    for workload in rendering.of_kind("Deployment", "StatefulSet"):
        selector = workload["spec"]["selector"]["matchLabels"]
        selected = [name for name, labels in pods if _matches(selector, labels)]
        own = f"{workload['kind']}/{workload['metadata']['name']}"
        if selected != [own]:
            yield f"{own}: selects {selected}"
        if len(selector) != 3:
            yield f"{own}: selects by {sorted(selector)}, and may never change that"
    selecting = [(t, t["spec"].get("selector")) for t in rendering.of_kind("Service")]
    selecting += [(t, t["spec"]["selector"]["matchLabels"]) for t in rendering.of_kind("PodDisruptionBudget")]
    selecting += [(t, t["spec"]["podSelector"]["matchLabels"]) for t in rendering.of_kind("NetworkPolicy")]
    selecting += [(t, t["spec"]["selector"]["matchLabels"]) for t in rendering.of_kind("PodMonitor")]
    for thing, selector in selecting:
        if not any(_matches(selector, labels) for _, labels in pods):
            yield f"{thing['kind']}/{thing['metadata']['name']}: selects no pod"
    services = [t["metadata"]["labels"] for t in rendering.of_kind("Service")]
    for monitor in rendering.of_kind("ServiceMonitor"):
        if not any(_matches(monitor["spec"]["selector"]["matchLabels"], labels) for labels in services):
            yield f"ServiceMonitor/{monitor['metadata']['name']}: selects no Service"


@check
def quantities_parse(rendering: Rendering) -> Iterator[str]:
    """Resources, sizes and targets."""
    for name, _, container in rendering.containers():
        for part, amounts in (container.get("resources") or {}).items():
            for resource, amount in amounts.items():
                if not _QUANTITY.fullmatch(str(amount)):
                    yield f"{name}: {part}.{resource}={amount!r}"
    claims = rendering.of_kind("PersistentVolumeClaim")
    for workload in rendering.of_kind("StatefulSet"):
        claims += workload["spec"].get("volumeClaimTemplates", [])
    for claim in claims:
        size = claim["spec"]["resources"]["requests"]["storage"]
        if not _QUANTITY.fullmatch(str(size)):
            yield f"claim {claim['metadata']['name']}: {size!r}"
    for scaler in rendering.of_kind("HorizontalPodAutoscaler"):
        for metric in scaler["spec"]["metrics"]:
            target = metric["external"]["target"]
            if not _QUANTITY.fullmatch(str(target.get("value", target.get("averageValue")))):
                yield f"HorizontalPodAutoscaler/{scaler['metadata']['name']}: target {target}"


@check
def services_lead_to_ports(rendering: Rendering) -> Iterator[str]:
    """Every port of a Service is one of the pods that it selects."""
    for service in rendering.of_kind("Service"):
        selector = service["spec"]["selector"]
        selected = [t for _, t in rendering.pods() if _matches(selector, t["metadata"]["labels"])]
        named = {p["name"] for t in selected for c in t["spec"]["containers"] for p in c.get("ports", [])}
        for port in service["spec"]["ports"]:
            if port["targetPort"] not in named:
                yield f"Service/{service['metadata']['name']}: no pod has a port {port['targetPort']}"


@check
def probes_ask_ports_that_exist(rendering: Rendering) -> Iterator[str]:
    """Ports of a container have valid names, no number twice, and probes ask them."""
    for name, _, container in rendering.containers():
        named = {port["name"] for port in container.get("ports", [])}
        numbers = [port["containerPort"] for port in container.get("ports", [])]
        if len(set(numbers)) < len(numbers) or not all(_PORT_NAME.fullmatch(p) and len(p) < 16 for p in named):
            yield f"{name}: ports {sorted(named)} {numbers}"
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            for kind in ("httpGet", "tcpSocket", "grpc"):
                port = container.get(probe, {}).get(kind, {}).get("port")
                if port is not None and port not in named and port not in numbers:
                    yield f"{name}: {probe} asks port {port}"


@check
def routes_lead_to_services(rendering: Rendering) -> Iterator[str]:
    """Ingress and HTTPRoute name Services and ports that exist."""
    services = {s["metadata"]["name"]: s for s in rendering.of_kind("Service")}
    backends: list[tuple[str, Any]] = []
    for ingress in rendering.of_kind("Ingress"):
        for rule in ingress["spec"]["rules"]:
            backends += [
                (p["backend"]["service"]["name"], p["backend"]["service"]["port"]["name"])
                for p in rule["http"]["paths"]
            ]
    for route in rendering.of_kind("HTTPRoute"):
        backends += [(ref["name"], ref["port"]) for rule in route["spec"]["rules"] for ref in rule["backendRefs"]]
    for name, port in backends:
        if not any(port in (p["name"], p["port"]) for p in services[name]["spec"]["ports"]):
            yield f"a route leads to {name}:{port}, which is none"


@check
def volumes_lead_somewhere(rendering: Rendering) -> Iterator[str]:
    """Volumes name ConfigMaps, Secrets and claims that exist or that the examples say are given."""
    maps = {t["metadata"]["name"] for t in rendering.of_kind("ConfigMap")}
    claims = {t["metadata"]["name"] for t in rendering.of_kind("PersistentVolumeClaim")} | _GIVEN_CLAIMS
    for name, template in rendering.pods():
        for volume in template["spec"]["volumes"]:
            named = [
                (volume.get("configMap", {}).get("name"), maps),
                (volume.get("secret", {}).get("secretName"), _secrets(rendering)),
                (volume.get("persistentVolumeClaim", {}).get("claimName"), claims),
            ]
            for given, known in named:
                if given is not None and given not in known:
                    yield f"{name}: volume {volume['name']} names {given}"


@check
def mounts_and_volumes_belong_together(rendering: Rendering) -> Iterator[str]:
    """Every mount has a volume, every volume a mount, and no path is mounted twice."""
    claimed = {
        t["metadata"]["name"]
        for w in rendering.of_kind("StatefulSet")
        for t in w["spec"].get("volumeClaimTemplates", [])
    }
    for name, template in rendering.pods():
        spec = template["spec"]
        volumes = {volume["name"] for volume in spec["volumes"]}
        if len(volumes) < len(spec["volumes"]):
            yield f"{name}: two volumes of one name"
        containers = [*spec.get("initContainers", []), *spec["containers"]]
        mounted = {mount["name"] for container in containers for mount in container["volumeMounts"]}
        for container in containers:
            paths = [mount["mountPath"] for mount in container["volumeMounts"]]
            if len(set(paths)) < len(paths):
                yield f"{name} {container['name']}: two mounts at one path"
        if unknown := mounted - volumes - claimed:
            yield f"{name}: mounts {unknown}, which are no volumes"
        if idle := volumes - mounted:
            yield f"{name}: no container mounts {idle}"


@check
def other_references_lead_somewhere(rendering: Rendering) -> Iterator[str]:
    """ServiceAccounts, Secrets of variables, scale targets."""
    accounts = {t["metadata"]["name"] for t in rendering.of_kind("ServiceAccount")}
    for name, template in rendering.pods():
        if template["spec"]["serviceAccountName"] not in accounts:
            yield f"{name}: no ServiceAccount {template['spec']['serviceAccountName']}"
    for name, _, container in rendering.containers():
        for entry in container.get("env", []):
            reference = entry.get("valueFrom", {}).get("secretKeyRef")
            if reference and reference["name"] not in _secrets(rendering):
                yield f"{name}: {entry['name']} from Secret {reference['name']}"
    workloads = {(t["kind"], t["metadata"]["name"]) for t in rendering.objects}
    for scaler in rendering.of_kind("HorizontalPodAutoscaler", "ScaledObject"):
        target = scaler["spec"]["scaleTargetRef"]
        if (target["kind"], target["name"]) not in workloads:
            yield f"{scaler['kind']}/{scaler['metadata']['name']}: scales {target}"


def _secrets(rendering: Rendering) -> set[str]:
    made = {t["spec"]["secretName"] for t in rendering.of_kind("Certificate")}
    return made | {t["metadata"]["name"] for t in rendering.of_kind("Secret")} | _GIVEN_SECRETS


@check
def pods_meet_the_restricted_standard(rendering: Rendering) -> Iterator[str]:
    """The Pod Security Standard "restricted" for pods, and more: no tokens, no service links."""
    allowed = {
        "configMap",
        "secret",
        "emptyDir",
        "persistentVolumeClaim",
        "projected",
        "downwardAPI",
        "csi",
        "ephemeral",
    }
    for name, template in rendering.pods():
        spec = template["spec"]
        pod = spec["securityContext"]
        if any(spec.get(key) for key in ("hostNetwork", "hostPID", "hostIPC")):
            yield f"{name}: uses the host's namespaces"
        if pod.get("runAsNonRoot") is not True or pod.get("runAsUser", 0) == 0:
            yield f"{name}: may run as root"
        if pod.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
            yield f"{name}: has no seccomp profile"
        if spec.get("automountServiceAccountToken") is not False or spec.get("enableServiceLinks") is not False:
            yield f"{name}: gets a token or service links"
        for volume in spec["volumes"]:
            if not allowed.issuperset(volume.keys() - {"name"}):
                yield f"{name}: volume {volume}"


@check
def containers_meet_the_restricted_standard(rendering: Rendering) -> Iterator[str]:
    """The same for containers, with read-only roots."""
    for name, _, container in rendering.containers():
        context = container.get("securityContext", {})
        if context.get("allowPrivilegeEscalation") is not False or context.get("privileged"):
            yield f"{name}: may escalate"
        if context.get("capabilities", {}).get("drop") != ["ALL"] or context["capabilities"].get("add"):
            yield f"{name}: keeps capabilities"
        if context.get("readOnlyRootFilesystem") is not True:
            yield f"{name}: may write to its root"
        if "/tmp" not in [mount["mountPath"] for mount in container["volumeMounts"]]:
            yield f"{name}: has no /tmp to write to"


@check
def containers_are_complete(rendering: Rendering) -> Iterator[str]:
    """Pinned images, probes where something serves, no variable twice, no hook before SIGTERM."""
    for name, template, container in rendering.containers():
        repository, _, tag = container["image"].rpartition(":")
        if not repository or tag in ("", "latest", "main") or "/" in tag:
            yield f"{name}: image {container['image']}"
        if container["imagePullPolicy"] != "IfNotPresent":
            yield f"{name}: pulls {container['imagePullPolicy']}"
        names = [entry["name"] for entry in container.get("env", [])]
        if len(set(names)) < len(names) or not all(_ENV_NAME.fullmatch(n) for n in names):
            yield f"{name}: variables {names}"
        if "lifecycle" in container:
            yield f"{name}: has a lifecycle hook"
        worker = template["metadata"]["labels"]["app.kubernetes.io/component"] == "generator-worker"
        if container.get("ports") and not worker:
            missing = {"startupProbe", "livenessProbe", "readinessProbe"} - container.keys()
            if missing:
                yield f"{name}: lacks {missing}"


@check
def pods_may_end_in_their_own_time(rendering: Rendering) -> Iterator[str]:
    """The grace period is longer than the drain time of the run file and the process's own margin."""
    run = yaml.safe_load(rendering.one("ConfigMap", "-run")["data"]["run.yaml"])
    drain = run.get("generator", {}).get("drain_timeout_seconds", 20)
    for name, template in rendering.pods():
        if template["spec"]["terminationGracePeriodSeconds"] < drain + 5 + 5:
            yield f"{name}: {template['spec']['terminationGracePeriodSeconds']} s for a drain of {drain} s"
