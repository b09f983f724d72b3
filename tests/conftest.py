"""Settings of every test: threads of libraries, repeatable property tests, order of files, garbage collection."""

import gc
import logging
import os
from collections.abc import Iterator

import pytest
import structlog
from hypothesis import HealthCheck, settings

from rollmesh.user_code import CODE_FOLDER

# Set before the libraries load. Threads that wait for each other cost tiny models up to 30 times their work.
for _library in ("OMP", "MKL", "OPENBLAS"):
    os.environ.setdefault(f"{_library}_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

settings.register_profile(
    "rollmesh",
    max_examples=50,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("rollmesh")

# gRPC starts threads in every fork of a process that has used it, and a process with threads cannot enter namespaces:
# without this, code that a test confines fails after a test of any gRPC port in the same process.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "false"

# Scanning the million objects of torch and other libraries took nearly half of the time of collection.
gc.disable()


@pytest.fixture(autouse=True)
def default_logging() -> Iterator[None]:
    """Undo what a test configured for structlog: a command run in this process logs to a file that ends with it."""
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


@pytest.fixture(autouse=True)
def no_code_folder() -> Iterator[None]:
    """Undo what a command run in this process set: user code of a later test would be searched beside its run file."""
    yield
    os.environ.pop(CODE_FOLDER, None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--skip-long", action="store_true", help="leave out the tests of `make test-all`")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out long tests where asked, and start files with slow tests first: processes then end at the same time."""
    if config.getoption("skip_long"):
        long = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if not item.get_closest_marker("long")]
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    """Collect only objects that tests create, and take torch's log records at the root logger.

    pytest gives its handlers to every logger that does not propagate, six times a test, and torch has forty of them.
    """
    gc.freeze()
    gc.enable()
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            logger.propagate = True
