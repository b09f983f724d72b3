"""No value does nothing: each one, changed alone, changes an object that a cluster gets."""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from .rendering import CHART, Helm, HelmError, Object

pytestmark = pytest.mark.slow

DEFAULTS: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
SGLANG_RUN = {"name": "sglang", "model": {"path": "/models/m"}, "generator": {"engine": "sglang"}}
OUR_REDIS: dict[str, Any] = {
    "secrets": {"existingSecret": "rollmesh"},
    "model": {"existingClaim": "models"},
    "data": {"existingClaim": "prompts"},
    "security": {"tls": {"enabled": True, "certManager": {"issuerName": "mesh"}}, "token": {"enabled": True}},
    "rollout": {"autoscaling": {"kind": "hpa"}},
    "generator": {"autoscaling": {"kind": "hpa"}},
    "reward": {"autoscaling": {"kind": "hpa"}},
    "run": {
        "name": "taught",
        "model": {"path": "recipe:countdown"},
        "teachers": {"any": {"model": "/models/m"}},
        "trainer": {"algorithm": {"teacher": {"reverse_kl_coefficient": 1.0}}},
    },
    "teacher": {"autoscaling": {"kind": "hpa"}},
    "trainer": {"processesPerNode": 2, "podDisruptionBudget": {"enabled": True}},
    "gateway": {
        "podDisruptionBudget": {"enabled": True},
        "ingress": {"enabled": True, "host": "a.example.org"},
        "httpRoute": {"enabled": True, "gatewayName": "public"},
    },
    "agents": {"enabled": True, "podDisruptionBudget": {"enabled": True}},
    "redis": {"podDisruptionBudget": {"enabled": True}},
    "monitoring": {"tlsSecret": "prometheus", "podMonitor": {"enabled": True}, "prometheusRule": {"enabled": True}},
}
YOUR_REDIS: dict[str, Any] = {
    "secrets": {"existingSecret": "rollmesh"},
    "run": SGLANG_RUN,
    "checkpoints": {"url": "s3://bucket/prefix"},
    "redis": {
        "enabled": False,
        "externalUrl": "rediss+sentinel://redis.example.org:26379/main/0",
        "externalSentinelPassword": True,
        "tlsSecret": "redis-tls",
    },
    "rollout": {"autoscaling": {"kind": "keda"}},
    "generator": {"kind": "StatefulSet", "sglang": {"sidecar": {"enabled": True}}},
    "keda": {"prometheusAddress": "http://prometheus:9090"},
    "security": {"tls": {"enabled": True, "existingSecret": "mesh-tls"}},
    "monitoring": {"tlsSecret": "prometheus", "serviceMonitor": {"enabled": True}},
}
SEVERAL_NODES: dict[str, Any] = {
    "secrets": {"existingSecret": "rollmesh"},
    "run": SGLANG_RUN,
    "generator": {"kind": "LeaderWorkerSet", "sglang": {"sidecar": {"enabled": True}}},
    "monitoring": {"dashboards": {"enabled": True}},
}
SITUATIONS = (OUR_REDIS, YOUR_REDIS, SEVERAL_NODES)
"""A value may matter in one of them alone."""

TEXTS = {"labels": {"a": "b"}, "annotations": {"a": "b"}, "nodeSelector": {"a": "b"}}
BY_NAME: dict[str, Any] = {
    **TEXTS,
    "podLabels": TEXTS["labels"],
    "podAnnotations": TEXTS["labels"],
    "serviceAccountAnnotations": TEXTS["labels"],
    "imagePullSecrets": [{"name": "registry"}],
    "hostnames": ["b.example.org"],
    "args": ["--tp-size=2"],
    "extraEnv": [{"name": "A", "value": "b"}],
    "extraVolumes": [{"name": "a", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "a", "mountPath": "/a"}],
    "monitoringFrom": [{"podSelector": {}}],
    "gatewayFrom": [{"podSelector": {}}],
    "agentsFrom": [{"podSelector": {}}],
    "rewardEgress": [],
    "affinity": {"nodeAffinity": {}},
    "tolerations": [{"key": "a", "operator": "Exists"}],
    "topologySpread": [{"topologyKey": "zone", "maxSkew": 2, "whenUnsatisfiable": "DoNotSchedule"}],
    "accessModes": ["ReadWriteOnce"],
    "resources": {"limits": {"memory": "2Gi"}},
    "validateResources": {"limits": {"memory": "1Gi"}},
    "behavior": {"scaleDown": {"stabilizationWindowSeconds": 7}},
    "digest": "sha256:" + "0" * 64,
    "maxUnavailable": 3,
    "minReplicas": 3,
}
BY_PATH: dict[str, Any] = {
    "run": {"name": "other", "model": {"path": "recipe:countdown"}},
    "teachers": {"any": {"replicas": 3}},
    "network.grpcPort": 7080,
    "keda.prometheusAddress": "https://other:9090",
    "checkpoints.url": "gs://other/prefix",
    "checkpoints.cacheVolume": {"hostPath": {"path": "/var/cache/rollmesh"}},
    "redis.externalUrl": "rediss+sentinel://other:26379/main/0",
    "redis.maxmemory": "2gb",
    "redis.persistence.size": "8Gi",
    "checkpoints.size": "8Gi",
    "generator.sharedMemory": "8Gi",
    "trainer.sharedMemory": "8Gi",
    "generator.leaderWorkerSet.size": 3,
    "monitoring.prometheusRule.runbookUrl": "https://a.example.org/runbooks",
    "monitoring.dashboards.labels.grafana_dashboard": "2",
}
FIXED = {"podSecurityContext.runAsNonRoot", "secrets.create", "redis.enabled"}
"""The schema allows one value, an existing Secret replaces the value (test_secrets.py), or another one changes with it
(test_values.py)."""


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(path, default) of every value that holds no others."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def at(values: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """The value at a dotted path."""
    found: Any = values
    for name in path.split("."):
        if not isinstance(found, Mapping) or name not in found:
            return default
        found = found[name]
    return found


def schema_at(path: str) -> dict[str, Any]:
    """The schema of a value."""
    found = SCHEMA
    for name in path.split("."):
        found = found.get("properties", {}).get(name, {})
    return found


def another(path: str, now: Any) -> Any:
    """A value that the schema allows there, and that is not the present one."""
    name = path.rpartition(".")[2]
    if path in BY_PATH or name in BY_NAME:
        return BY_PATH.get(path, BY_NAME.get(name))
    allowed = schema_at(path).get("enum")
    if allowed:
        return next(value for value in allowed if value not in (now, "LeaderWorkerSet"))
    match now:
        case bool():
            return not now
        case int() | float():
            return now + 1
        case str():
            return f"{now}x"
    raise AssertionError(f"{path}: name another value than {now!r} in BY_NAME or BY_PATH")


def merged(values: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of the values with another one at a path."""
    name, _, rest = path.partition(".")
    inner = values.get(name) or {}
    return {**values, name: merged(inner, rest, value) if rest else value}


def rendered(helm: Helm, values: Mapping[str, Any], folder: Path) -> list[Object]:
    """Return the objects that a cluster would get."""
    file = folder / f"{hash(json.dumps(values, sort_keys=True))}.yaml"
    file.write_text(json.dumps(values))
    return helm.template(CHART, [file]).objects


@pytest.mark.timeout(600)
def test_every_value_has_an_effect(helm4: Helm, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = [rendered(helm4, situation, tmp_path) for situation in SITUATIONS]

    def matters(leaf: tuple[str, Any]) -> bool:
        path, default = leaf
        for situation, objects in zip(SITUATIONS, before, strict=True):
            value = another(path, at(situation, path, default))
            try:
                if rendered(helm4, merged(situation, path, value), tmp_path) != objects:
                    return True
            except HelmError as refusal:
                # Not in this situation, says the chart; the schema itself has nothing against the value.
                assert "values don't meet the specifications" not in str(refusal), f"{path}={value}: {refusal}"
        return False

    found = [leaf for leaf in leaves(DEFAULTS) if leaf[0] not in FIXED]
    with ThreadPoolExecutor(os.cpu_count() or 1) as executor:
        idle = [path for (path, _), effect in zip(found, executor.map(matters, found), strict=True) if not effect]
    assert not idle, f"values that change nothing: {idle}"
    assert len(found) > 250, "values.yaml was read"
    with capsys.disabled():
        print(f"\nchart: {len(found)} values, each of which changes an object", file=sys.stderr)


def test_a_value_that_no_pod_reads_leaves_the_server_of_the_queue_alone(helm4: Helm) -> None:
    kind = CHART / "ci" / "kind-cpu-values.yaml"
    now = helm4.template(CHART, [kind]).component("redis")
    for item in ("redis.podDisruptionBudget.enabled=true", "redis.externalPassword=false"):
        assert helm4.template(CHART, [kind], [item]).component("redis") == now, f"{item} restarts Redis"
    for item in ("redis.maxmemory=300mb", "redis.extraConfig=hz 20"):
        assert helm4.template(CHART, [kind], [item]).component("redis") != now, f"{item} is read at its start alone"
