"""One real SGLang server for the whole session, three policies that it can load, and what plain HF says about them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers.utils.logging import disable_progress_bar

from ..sglang_cpu import install
from ..sglang_cpu.server import SglangServer, running_server
from .served import Policies, Served, write_policy

_TEST_SECONDS = 1500
"""The first test waits for the start of its server, which takes minutes on busy cores."""
_HERE = Path(__file__).parent
_ARGUMENTS = (
    *("--max-total-tokens", "16384", "--max-running-requests", "32", "--weight-version", "0"),
    # The server's own warm-up sends an English text otherwise, and the policies have no tokenizer.
    "--skip-tokenizer-init",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every deadline inside of a test passes first and says what it waited for; one process has the servers."""
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(pytest.mark.timeout(_TEST_SECONDS))
            item.add_marker(pytest.mark.xdist_group("server facts"))


@pytest.fixture(scope="session", autouse=True)
def _quiet() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    disable_progress_bar()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def sglang_python() -> Path:
    """The python of the environment with the server; skips with the reason where it could not be made."""
    try:
        return install.find_python()
    except install.NotInstalled as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Policies:
    """Three policy versions that answer differently."""
    root = tmp_path_factory.mktemp("policies")
    return Policies({version: write_policy(root / f"policy-{version}", seed=version) for version in range(3)})


@pytest.fixture(scope="session")
def sglang_server(
    sglang_python: Path, policies: Policies, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SglangServer]:
    """A server with the schedule that it has by default: the next step overlaps the accounts of the last one."""
    log = tmp_path_factory.mktemp("sglang") / "server.log"
    with running_server(sglang_python, policies.folders[0], log, _ARGUMENTS) as server:
        yield server


@pytest.fixture
def served(sglang_server: SglangServer, policies: Policies) -> Iterator[Served]:
    """The server on policy version 0, running, with an empty cache."""
    with Served(sglang_server, policies) as served:
        served.reset()
        yield served


@pytest.fixture(scope="module")
def serial_served(
    sglang_python: Path, policies: Policies, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """A server of its own that finishes each step before it starts the next."""
    log = tmp_path_factory.mktemp("sglang-serial") / "server.log"
    with running_server(sglang_python, policies.folders[0], log, (*_ARGUMENTS, "--disable-overlap-schedule")) as server:
        with Served(server, policies) as served:
            served.reset()
            yield served
