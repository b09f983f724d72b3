"""What every test shares: seeded, machine-independent property tests, and no search for garbage in what is imported."""

import gc
import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "rollmesh",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("rollmesh")

# gRPC starts threads in every fork of a process that has used it, and a process with threads cannot enter namespaces:
# without this, code that a test confines fails after a test of any gRPC port in the same process.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "false"

# Looking for garbage among the million objects of torch and its like took nearly half of the time of collection.
gc.disable()


def pytest_collection_finish() -> None:
    """What the tests themselves leave behind is looked for, as ever."""
    gc.freeze()
    gc.enable()
