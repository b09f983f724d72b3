"""The chart renders with every example on Helm 3 and 4, and what comes out is valid for Kubernetes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .object_checks import all_checks
from .rendering import CHART, EXAMPLES, POD_KINDS, ROOT, Helm, HelmError, Rendering

VERSIONS = [f"1.{minor}" for minor in range(29, 38)]
VALUES = sorted((ROOT / "examples" / "kubernetes").glob("*-values.yaml"))


def validated(tools: Path, objects: list[dict[str, Any]], versions: list[str] = VERSIONS) -> dict[str, Any]:
    """The verdict of tools/validate.py."""
    script = Path(__file__).with_name("tools") / "validate.py"
    asked = json.dumps({"versions": versions, "objects": objects})
    command = [tools / "bin" / "python", script]
    done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    verdict: dict[str, Any] = json.loads(done.stdout)
    return verdict


def test_both_supported_versions_of_helm_are_tested(tools: Path) -> None:
    found = {name: Helm(tools / "bin" / name).version() for name in ("helm3", "helm4")}
    assert found["helm3"].startswith("v3.17.") and found["helm4"].startswith("v4.3."), found


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_passes_strict_lint_and_renders_the_same_on_both(helm: Helm, helm4: Helm, example: Path) -> None:
    assert "0 chart(s) failed" in helm.lint(CHART, [example])
    assert helm.template(CHART, [example]).objects == helm4.template(CHART, [example]).objects


def test_every_object_is_valid_for_every_supported_kubernetes(
    tools: Path, renderings: list[Rendering], capsys: pytest.CaptureFixture[str]
) -> None:
    objects = [thing for rendering in renderings for thing in rendering.objects]
    verdict = validated(tools, objects)
    assert not verdict["problems"], "\n".join(verdict["problems"])
    with capsys.disabled():
        print(
            f"\nchart: {len(objects)} objects of {len(EXAMPLES)} examples, {verdict['checked']} checks against "
            f"Kubernetes {VERSIONS[0]} to {VERSIONS[-1]} and the custom resources' schemas: 0 problems",
            file=sys.stderr,
        )
    kinds = {thing["kind"] for thing in objects}
    missing = {
        "Deployment", "StatefulSet", "Job", "LeaderWorkerSet", "Service", "ServiceAccount", "ConfigMap", "Ingress",
        "PersistentVolumeClaim", "PodDisruptionBudget", "NetworkPolicy", "HorizontalPodAutoscaler", "ScaledObject",
        "HTTPRoute", "Certificate", "PodMonitor", "ServiceMonitor", "PrometheusRule",
    } - kinds  # fmt: skip
    assert not missing, f"no example renders {missing}"


def test_only_kubernetes_1_29_and_newer_is_accepted(helm: Helm) -> None:
    example = EXAMPLES[0]
    helm.template(CHART, [example], (), "--kube-version", "1.29.0")
    with pytest.raises(HelmError, match="1.29.0"):
        helm.template(CHART, [example], (), "--kube-version", "1.28.9")


@pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)
def test_the_values_of_an_example_render_valid_objects(helm: Helm, tools: Path, values: Path) -> None:
    rendering = helm.template(CHART, [values])
    assert "0 chart(s) failed" in helm.lint(CHART, [values])
    for check in all_checks():
        assert not list(check(rendering)), check.__name__
    assert not validated(tools, rendering.objects, [VERSIONS[0], VERSIONS[-1]])["problems"]


@pytest.mark.parametrize(
    "values",
    [ROOT / "examples" / "kubernetes" / "countdown-cpu-values.yaml", CHART / "ci" / "kind-cpu-values.yaml"],
    ids=lambda path: path.stem,
)
def test_a_node_of_two_cpus_has_room_for_the_values_of_a_small_cluster_and_its_own_services(
    helm4: Helm, values: Path
) -> None:
    asked = 0.0
    for workload in helm4.template(CHART, [values]).of_kind(*POD_KINDS):
        spec = workload["spec"]
        for container in spec["template"]["spec"]["containers"]:
            milli = container["resources"]["requests"]["cpu"].removesuffix("m")
            asked += spec.get("replicas", spec.get("completions")) * int(milli) / 1000
    assert 0.5 < asked <= 1.0, "of 2, where the services of a kind node ask for 0.95"
