"""Verifiers of the user's own: ``module:function`` and ``module:Class``."""

import sys
from pathlib import Path
from typing import Any

import pytest

from rollmesh.errors import ConfigError
from rollmesh.tasks.verifiers.verifier_protocol import build_verifier

OWN = '''
def short_and_right(response, metadata, limit=20):
    """1 for a right answer, half for a right one that is long."""
    right = metadata["answer"] in response
    return float(right) * (1.0 if len(response) <= limit else 0.5)

def strict(response, metadata):
    return 0
strict.timeout_means_wrong = True

async def slow(response, metadata):
    return 0

def no_metadata(response):
    return 0

class Length:
    timeout_means_wrong = False
    def __init__(self, unit=1):
        self.unit = unit
    def verify(self, response, prompt_metadata):
        return len(response) / self.unit

class Nothing:
    pass

number = 3
'''


@pytest.fixture(autouse=True)
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_verifiers_module.py").write_text(OWN)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "own_verifiers_module", raising=False)


def test_a_function_is_called_with_the_response_the_metadata_and_the_options() -> None:
    verifier = build_verifier("own_verifiers_module:short_and_right", {"limit": 5})
    assert verifier.verify("42", {"answer": "42"}) == 1.0
    assert verifier.verify("it is 42", {"answer": "42"}) == 0.5
    assert verifier.verify("41", {"answer": "42"}) == 0.0
    assert not verifier.timeout_means_wrong


def test_a_function_can_declare_what_its_time_out_means() -> None:
    assert build_verifier("own_verifiers_module:strict", {}).timeout_means_wrong


def test_a_class_is_made_with_the_options() -> None:
    assert build_verifier("own_verifiers_module:Length", {"unit": 2}).verify("four", {}) == 2.0


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("own_verifiers_module:missing", {}, "reward.verifier: module .* has no 'missing'"),
        ("no_such_module_y:f", {}, "reward.verifier: no module 'no_such_module_y'"),
        ("own_verifiers_module:number", {}, "must be a plain function of .response"),
        ("own_verifiers_module:slow", {}, "must be a plain function"),
        ("own_verifiers_module:no_metadata", {}, "cannot be called as f"),
        ("own_verifiers_module:strict", {"x": 1}, "cannot be called as f"),
        ("own_verifiers_module:Length", {"x": 1}, "reward.options: .* rejects"),
        ("own_verifiers_module:Nothing", {}, "needs a method verify"),
        (":f", {}, "must have the form module:name"),
    ],
)
def test_what_is_no_verifier_is_refused_by_name(target: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_verifier(target, options)


def test_an_error_inside_the_module_names_its_line(tmp_path: Path) -> None:
    (tmp_path / "own_broken_module.py").write_text("import does_not_exist_z\n")
    with pytest.raises(ConfigError, match=r"'does_not_exist_z' \(.*own_broken_module.py:1\)"):
        build_verifier("own_broken_module:f", {})
