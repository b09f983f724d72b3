"""The values of examples/kubernetes render on both versions of Helm, and their objects are valid."""

from __future__ import annotations

from pathlib import Path

import pytest

from .object_checks import all_checks
from .rendering import CHART, POD_KINDS, ROOT, Helm
from .test_rendering import VERSIONS, validated

VALUES = sorted((ROOT / "examples" / "kubernetes").glob("*-values.yaml"))


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
