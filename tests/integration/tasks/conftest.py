import pytest

from rollmesh.tasks.sandbox.command import Sandbox


@pytest.fixture
def code_may_run() -> None:
    """Skip where code is refused: an ordinary user on a machine without user namespaces."""
    if reason := Sandbox.unsafe_reason():
        pytest.skip(f"code is refused here: {reason}")
