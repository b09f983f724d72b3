"""The verifier that misbehaves, importable by the worker processes."""

from collections.abc import Iterator

import pytest

from .reward_bench import POISONOUS


@pytest.fixture(autouse=True, scope="session")
def poisonous_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("poisonous")
    (folder / "poisonous.py").write_text(POISONOUS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        yield
