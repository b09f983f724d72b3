"""values.schema.json: types from the defaults, closed everywhere, with the rules that a default cannot show."""

from collections.abc import Sequence
from typing import Any

from rollmesh.config import RunConfig
from rollmesh.config.services import LauncherConfig

Schema = dict[str, Any]

_TEXTS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
_TREE: Schema = {"$ref": "#/definitions/tree"}
_DEFINITIONS: Schema = {
    "tree": {
        "properties": {
            "matchLabels": _TEXTS,
            "values": {"type": "array", "items": {"type": "string"}},
            "volumeAttributes": _TEXTS,
        },
        "additionalProperties": _TREE,
        "items": _TREE,
    }
}
"""A part of a Kubernetes object, of which only what Kubernetes has as text is checked: a number there reads well in
YAML, and the API server refuses it."""
_OBJECTS: Schema = {"type": "array", "items": {"allOf": [{"type": "object"}, _TREE]}}
_NAMED: Schema = {"type": "array", "items": {"type": "object", "required": ["name"]}}
_UNIT = r"([kMGTPE]|[KMGTPE]i)"
_BYTES: Schema = {
    "oneOf": [
        {"type": "string", "pattern": rf"^([0-9]+(\.[0-9]+)?{_UNIT}|[0-9]{{7,}})$"},
        {"type": "integer", "minimum": 1_000_000},
    ]
}
"""A size with a unit; without one it is bytes, which nobody means by a small number."""
_QUANTITIES: Schema = {
    "type": "object",
    "patternProperties": {"^(memory|ephemeral-storage|hugepages-.*)$": _BYTES},
    "additionalProperties": {
        "oneOf": [{"type": "string", "pattern": rf"^[0-9]+(\.[0-9]+)?(m|{_UNIT})?$"}, {"type": "number"}]
    },
}
_PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
_SCALING_DIRECTION: Schema = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "stabilizationWindowSeconds": {"type": "integer", "minimum": 0, "maximum": 3600},
        "selectPolicy": {"enum": ["Max", "Min", "Disabled"]},
        "tolerance": {"type": ["string", "number"]},
        "policies": _OBJECTS,
    },
}


def _closed(properties: Schema, required: Sequence[str] = ()) -> Schema:
    schema: Schema = {"type": "object", "additionalProperties": False, "properties": properties}
    return schema | ({"required": list(required)} if required else {})


_BY_NAME: dict[str, Schema] = {
    **dict.fromkeys(("podLabels", "podAnnotations", "serviceAccountAnnotations"), _TEXTS),
    **dict.fromkeys(("annotations", "labels", "nodeSelector"), _TEXTS),
    "imagePullSecrets": {"type": "array", "items": _closed({"name": {"type": "string"}}, ["name"])},
    "hostnames": {"type": "array", "items": {"type": "string"}},
    "args": {"type": "array", "items": {"type": "string"}},
    "extraEnv": {
        "type": "array",
        "items": _closed(
            {"name": {"type": "string"}, "value": {"type": "string"}, "valueFrom": {"type": "object"}}, ["name"]
        ),
    },
    "extraVolumes": {"type": "array", "items": {"allOf": [{"type": "object", "required": ["name"]}, _TREE]}},
    "extraVolumeMounts": {"type": "array", "items": {"type": "object", "required": ["name", "mountPath"]}},
    "monitoringFrom": {**_OBJECTS, "minItems": 1},
    **dict.fromkeys(("gatewayFrom", "agentsFrom", "rewardEgress"), _OBJECTS),
    "affinity": _closed({name: _TREE for name in ("nodeAffinity", "podAffinity", "podAntiAffinity")}),
    "behavior": _closed({"scaleUp": _SCALING_DIRECTION, "scaleDown": _SCALING_DIRECTION}),
    **dict.fromkeys(
        ("resources", "validateResources"), _closed({"limits": _QUANTITIES, "requests": _QUANTITIES, "claims": _NAMED})
    ),
    "tolerations": {
        "type": "array",
        "items": _closed(
            {
                "key": {"type": "string"},
                "operator": {"type": "string"},
                "value": {"type": "string"},
                "effect": {"enum": ["NoSchedule", "PreferNoSchedule", "NoExecute"]},
                "tolerationSeconds": {"type": "integer"},
            }
        ),
    },
    "topologySpread": {
        "type": "array",
        "items": _closed(
            {
                "topologyKey": {"type": "string"},
                "maxSkew": {"type": "integer", "minimum": 1},
                "whenUnsatisfiable": {"enum": ["ScheduleAnyway", "DoNotSchedule"]},
            },
            ["topologyKey", "maxSkew", "whenUnsatisfiable"],
        ),
    },
    "accessModes": {"type": "array", "minItems": 1, "items": {"enum": ["ReadWriteMany", "ReadWriteOnce"]}},
    "pullPolicy": {"enum": ["IfNotPresent", "Always", "Never"]},
    "maxUnavailable": {"oneOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": "^[0-9]+%$"}]},
    "digest": {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
    "repository": {"type": "string", "pattern": "^[^:@\\s]+(:[0-9]+/[^:@\\s]+)?$"},
    "tag": {"type": "string", "not": {"enum": ["latest", "main", "master"]}},
    **dict.fromkeys(("grpcPort", "adminPort", "port", "rendezvousPort"), _PORT),
    "nodes": {"type": "integer", "minimum": 1},
    "processesPerNode": {"type": "integer", "minimum": 1},
    "size": _BYTES,
    "sharedMemory": {"anyOf": [{"const": ""}, _BYTES]},
}
_BY_PATH: dict[str, Schema] = {
    "teachers": {"type": "object"},
    "imageRegistry": {"type": "string", "pattern": r"^([^:@\s]+(:[0-9]+(/[^:@\s]*)?)?)?$"},
    "generator.kind": {"enum": ["Deployment", "StatefulSet", "LeaderWorkerSet"]},
    "trainer.kind": {"enum": ["Job", "StatefulSet"]},
    **{f"{name}.service.type": {"enum": ["ClusterIP", "NodePort", "LoadBalancer"]} for name in ("gateway", "agents")},
    "redis.appendfsync": {"enum": ["everysec", "always"]},
    "redis.externalUrl": {
        "type": "string",
        "pattern": r"^($|(rediss?(\+sentinel)?)://([^:@/]*@)?[^@]*$)",
        "not": {"pattern": "[?&]password="},
    },
    "redis.maxmemory": {"type": "string", "pattern": "^([0-9]+[kKmMgG][bB]?|[0-9]{7,}[bB]?)$"},
    "generator.leaderWorkerSet.size": {"type": "integer", "minimum": 2},
    "checkpoints.cacheVolume": _closed({name: _TREE for name in ("emptyDir", "ephemeral", "hostPath", "csi")}),
    "keda.prometheusAddress": {"type": "string", "pattern": "^($|https?://.+)"},
    "checkpoints.url": {"type": "string", "pattern": r"^($|(s3|gs)://.+)"},
    "monitoring.prometheusRule.runbookUrl": {"type": "string", "pattern": r"^($|https?://[^\s#]+$)"},
    "security.tls.certManager.issuerKind": {"enum": ["Issuer", "ClusterIssuer"]},
    "podSecurityContext.runAsNonRoot": {"const": True},
    "podSecurityContext.runAsUser": {"type": "integer", "minimum": 1},
    "podSecurityContext.fsGroupChangePolicy": {"enum": ["OnRootMismatch", "Always"]},
    "podSecurityContext.seccompProfile": _closed(
        {"type": {"enum": ["RuntimeDefault", "Localhost"]}, "localhostProfile": {"type": "string"}}, ["type"]
    ),
    **{
        f"{name}.autoscaling.kind": {"enum": ["", "hpa", "keda"]}
        for name in ("rollout", "generator", "reward", "teacher")
    },
}
_SET_BY_CHART = frozenset({"folder", "network", "security"})
"""Sections of the run file that the chart writes."""
_READ_BY_SERVICES = frozenset({"torch_threads", "start_timeout_seconds"})
"""Fields of the launcher section that services read too; only a local launcher reads the others."""
_FIELDS_SET_BY_CHART = {
    "store": ("url", "password", "sentinel_password", "maxmemory_bytes", "appendfsync"),
    "checkpoints": ("folder", "secret", "cache_folder"),
    "reward": ("address",),
    "gateway": ("enabled", "host", "port", "token"),
    "agents": ("enabled", "host", "port"),
    "launcher": tuple(name for name in LauncherConfig.model_fields if name not in _READ_BY_SERVICES),
}
"""Fields that would have no effect in a run file, because environment variables of the chart win over them or because
only a local launcher reads them; and a secret would be readable in a ConfigMap."""


def schema_of(values: dict[str, Any], texts: dict[str, str]) -> Schema:
    """Return the JSON schema of the chart's values; ``texts`` has their comments by path."""
    schema = _section(values, "", texts)
    schema["properties"]["run"] = _run_section(texts["run"])
    schema["properties"]["teachers"]["additionalProperties"] = schema["properties"]["teacher"]
    # Helm puts this in when the chart is a dependency of another one.
    schema["properties"]["global"] = {"type": "object"}
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Values of the rollmesh chart"}
    return {**head, **schema, "definitions": _DEFINITIONS}


def _section(values: dict[str, Any], prefix: str, texts: dict[str, str]) -> Schema:
    properties = {}
    for name, value in values.items():
        path = f"{prefix}{name}"
        schema = dict(_BY_PATH.get(path) or _BY_NAME.get(name) or _by_default(value, path, texts))
        properties[name] = {"description": texts[path], **schema} if path in texts else schema
    return _closed(properties)


def _by_default(value: Any, path: str, texts: dict[str, str]) -> Schema:
    match value:
        case bool():
            return {"type": "boolean"}
        case int():
            return {"type": "integer", "minimum": 0}
        case str():
            return {"type": "string"}
        case dict() if path == "run":
            return {}
        case dict() if value:
            return _section(value, f"{path}.", texts)
    raise ValueError(f"values.yaml: {path}: its default {value!r} shows no type; add it to chart_schema.py")


def _run_section(description: str) -> Schema:
    """Return the schema of a run file's sections; the program checks their fields and says more than a schema can.

    The templates require name and model of a run that is not empty.
    """
    properties: Schema = {name: {"type": "object"} for name in RunConfig.model_fields if name not in _SET_BY_CHART}
    for section, names in _FIELDS_SET_BY_CHART.items():
        properties[section] = _without(*names)
    server = {"type": "object", "properties": {"replicas": False, "sglang": _without("admin_key")}}
    properties["generator"] = server
    properties["teachers"] = {"type": "object", "additionalProperties": server}
    # Only `rollmesh up` makes these evaluations; false, as in a resolved run file, asks for nothing.
    properties["evaluation"] = {"type": "object", "properties": {"before_and_after": {"const": False}}}
    properties["name"] = {"type": "string", "pattern": "^[a-z0-9]([a-z0-9_-]{0,61}[a-z0-9])?$"}
    properties["seed"] = {"type": "integer"}
    properties["model"] = {"type": "object", "required": ["path"], "properties": {"path": {"type": "string"}}}
    return {"description": description, **_closed(properties)}


def _without(*names: str) -> Schema:
    return {"type": "object", "properties": dict.fromkeys(names, False)}
