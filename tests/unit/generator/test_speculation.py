"""Speculation of the torch engine: the same tokens as plain decoding, in fewer steps."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from rollmesh.config.generator import GeneratorConfig


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"pace": [(1, 0.01)]}, r"generator\.speculation=history: generator\.pace has"),
        ({"engine": "sglang"}, r"generator\.speculation=history: for engine=torch only"),
        ({"speculation": "eagle"}, "speculation"),
    ],
)
def test_what_speculation_does_not_go_with_is_refused_by_name(changes, text):
    assert GeneratorConfig().speculation == "off"
    with pytest.raises(ValidationError, match=text):
        GeneratorConfig(**{"speculation": "history", **changes})
