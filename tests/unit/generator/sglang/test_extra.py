"""A GPU host installs the SGLang version that the tests run."""

import tomllib
from pathlib import Path

_ROOT = Path(__file__).parents[4]


def test_the_extra_pins_the_server_that_the_tests_run():
    extras = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (pin,) = (requirement.split(";")[0] for requirement in extras["sglang"])
    tested = (_ROOT / "tests" / "sglang_cpu" / "no_deps.txt").read_text().splitlines()
    assert pin.startswith("sglang==") and pin in tested
