"""Rendering the chart with a real Helm, and finding things in what comes out."""

import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

Object = dict[str, Any]

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "helm" / "rollmesh"
EXAMPLES = sorted((CHART / "ci").glob("*-values.yaml"))
RUN_FILES = [
    *(pytest.param(example, [], id=example.stem) for example in EXAMPLES),
    pytest.param(
        CHART / "ci" / "external-redis-s3-values.yaml",
        [
            "run.checkpoints.anchor_every_versions=8",
            "run.checkpoints.object_store.endpoint_url=https://minio:9000",
            "run.store.tls.check_hostname=false",
        ],
        id="fields-that-need-the-bucket-and-the-tls-files-of-the-environment",
    ),
]
"""Examples, and values set in addition."""
RELEASE, NAMESPACE = "demo", "rl"
POD_KINDS = ("Deployment", "StatefulSet", "Job", "LeaderWorkerSet")


class HelmError(Exception):
    """Helm refused; the text is what it said."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """Everything that one `helm template` gave."""

    name: str
    objects: list[Object]

    def of_kind(self, *kinds: str) -> list[Object]:
        """Objects of these kinds."""
        return [thing for thing in self.objects if thing["kind"] in kinds]

    def one(self, kind: str, ending: str = "") -> Object:
        """The only object of a kind whose name ends so."""
        (found,) = [o for o in self.of_kind(kind) if o["metadata"]["name"].endswith(ending)]
        return found

    def pods(self) -> Iterator[tuple[str, Object]]:
        """(name, pod template) of every workload."""
        for workload in self.of_kind(*POD_KINDS):
            name = f"{workload['kind']}/{workload['metadata']['name']}"
            if workload["kind"] == "LeaderWorkerSet":
                templates = workload["spec"]["leaderWorkerTemplate"]
                yield f"{name} leader", templates["leaderTemplate"]
                yield f"{name} worker", templates["workerTemplate"]
            else:
                yield name, workload["spec"]["template"]

    def containers(self) -> Iterator[tuple[str, Object, Object]]:
        """(name, pod template, container) of every container, init containers included."""
        for name, template in self.pods():
            spec = template["spec"]
            for container in [*spec.get("initContainers", []), *spec["containers"]]:
                yield f"{name} {container['name']}", template, container

    def component(self, component: str) -> Object:
        """The pod template of a component."""
        label = "app.kubernetes.io/component"
        (found,) = [t for _, t in self.pods() if t["metadata"]["labels"][label] == component]
        return found


@dataclass(frozen=True, slots=True)
class Helm:
    """One Helm binary."""

    binary: Path

    def template(self, chart: Path, values: Sequence[Path] = (), sets: Sequence[str] = (), *flags: str) -> Rendering:
        """`helm template`; raises HelmError with what Helm said."""
        text = self._run("template", RELEASE, str(chart), "--namespace", NAMESPACE, *flags, *_options(values, sets))
        # The loader written in C: dashboards are ten thousand lines.
        objects = [thing for thing in yaml.load_all(text, Loader=yaml.CSafeLoader) if thing]
        return Rendering(name=" ".join(path.name for path in values) or "defaults", objects=objects)

    def lint(self, chart: Path, values: Sequence[Path]) -> str:
        """`helm lint --strict`; raises HelmError."""
        return self._run("lint", "--strict", str(chart), *_options(values, ()))

    def version(self) -> str:
        """Such as v3.17.2."""
        return self._run("version", "--template", "{{.Version}}")

    def notes(self, chart: Path, values: Sequence[Path]) -> str:
        """NOTES.txt as `helm install --dry-run=client` would show it."""
        flags = ("--dry-run=client", "--namespace", NAMESPACE)
        return self._run("install", RELEASE, str(chart), *flags, *_options(values, ())).partition("NOTES:")[2]

    def _run(self, *arguments: str) -> str:
        done = subprocess.run([self.binary, *arguments], capture_output=True, text=True, timeout=120)
        if done.returncode != 0:
            raise HelmError(done.stdout + done.stderr)
        return done.stdout


def _options(values: Sequence[Path], sets: Sequence[str]) -> list[str]:
    return [f"--values={path}" for path in values] + [f"--set={item}" for item in sets]
