"""Checks Kubernetes objects by schema; runs in the environment "chart-tools".

Standard input: {"versions": ["1.29", ...], "objects": [...]}. Standard output: {"checked": N, "problems": [...]}.

Core kinds: the published schemas of each version, unknown fields refused. Custom resources: typed models of their
definitions, and because those overlook unknown fields, what they read must be what was written. LeaderWorkerSet and
HTTPRoute have no package of that sort: schemas.json has what of their definitions the chart uses, written by us.
"""

import json
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate

Object = dict[str, Any]
MODELS = {
    ("keda.sh/v1alpha1", "ScaledObject"): "cloudcoil.models.keda.v1alpha1",
    ("monitoring.coreos.com/v1", "PodMonitor"): "cloudcoil.models.prometheus_operator.v1",
    ("monitoring.coreos.com/v1", "ServiceMonitor"): "cloudcoil.models.prometheus_operator.v1",
    ("monitoring.coreos.com/v1", "PrometheusRule"): "cloudcoil.models.prometheus_operator.v1",
    ("cert-manager.io/v1", "Certificate"): "cloudcoil.models.cert_manager.v1",
}
OWN: dict[str, Object] = json.loads(Path(__file__).with_name("schemas.json").read_text(encoding="utf-8"))


def problems_of(thing: Object, versions: list[str]) -> Iterator[tuple[int, str]]:
    """(checks made, problem or nothing) of one object."""
    kind = (thing["apiVersion"], thing["kind"])
    if kind in MODELS:
        yield 1, _by_model(thing, MODELS[kind])
    elif "/".join(kind) in OWN:
        yield 1, _by_own_schema(thing, OWN["/".join(kind)])
        if thing["kind"] == "LeaderWorkerSet":
            for name in ("leaderTemplate", "workerTemplate"):
                pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": name}}
                pod["template"] = thing["spec"]["leaderWorkerTemplate"][name]
                yield from problems_of(pod, versions)
    else:
        for version in versions:
            yield 1, _by_kubernetes(thing, version)


def _by_kubernetes(thing: Object, version: str) -> str:
    try:
        kubernetes_validate.validate(thing, version, strict=True)
    except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
        return f"Kubernetes {version}: {error}"
    return ""


def _by_own_schema(thing: Object, schema: Object) -> str:
    errors = jsonschema.Draft202012Validator(schema).iter_errors(thing)
    return "; ".join(f"{'.'.join(map(str, e.absolute_path))}: {e.message}" for e in errors)


def _by_model(thing: Object, module: str) -> str:
    model: Callable[..., Any] = getattr(import_module(module), thing["kind"])
    try:
        read = model.model_validate(thing)  # type: ignore[attr-defined]
    except ValueError as error:
        return str(error)
    again = json.loads(read.model_dump_json(by_alias=True, exclude_unset=True))
    return "; ".join(_lost(thing, again, ""))


def _lost(written: Any, read: Any, path: str) -> Iterator[str]:
    """Fields that a model does not know."""
    if isinstance(written, dict) and isinstance(read, dict):
        for key, value in written.items():
            if key not in read:
                yield f"{path}.{key}: unknown field"
            else:
                yield from _lost(value, read[key], f"{path}.{key}")
    elif isinstance(written, list) and isinstance(read, list) and len(written) == len(read):
        for index, pair in enumerate(zip(written, read, strict=True)):
            yield from _lost(*pair, f"{path}[{index}]")
    elif written != read and str(written) != str(read):
        yield f"{path}: {written!r} was read as {read!r}"


def main() -> None:
    """Read objects, write the verdict."""
    asked = json.load(sys.stdin)
    checked, problems = 0, []
    for thing in asked["objects"]:
        name = f"{thing['kind']}/{thing['metadata']['name']}"
        for count, problem in problems_of(thing, asked["versions"]):
            checked += count
            problems += [f"{name}: {problem}"] if problem else []
    json.dump({"checked": checked, "problems": problems}, sys.stdout)


if __name__ == "__main__":
    main()
