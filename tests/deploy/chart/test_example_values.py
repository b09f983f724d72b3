"""The values of examples/kubernetes render on both versions of Helm, and their objects are valid."""

from __future__ import annotations

from pathlib import Path

import pytest

from .object_checks import all_checks
from .rendering import CHART, ROOT, Helm
from .test_rendering import VERSIONS, validated

VALUES = sorted((ROOT / "examples" / "kubernetes").glob("*-values.yaml"))


@pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)
def test_the_values_of_an_example_render_valid_objects(helm: Helm, tools: Path, values: Path) -> None:
    rendering = helm.template(CHART, [values])

    assert "0 chart(s) failed" in helm.lint(CHART, [values])
    for check in all_checks():
        assert not list(check(rendering)), check.__name__
    assert not validated(tools, rendering.objects, [VERSIONS[0], VERSIONS[-1]])["problems"]
