"""Settings of every test: one thread per math library, repeatable property tests, no garbage collection of imports."""

import gc
import os

from hypothesis import HealthCheck, settings

# Set before the libraries load. Threads that wait for each other cost tiny models up to 30 times their work.
for _library in ("OMP", "MKL", "OPENBLAS"):
    os.environ.setdefault(f"{_library}_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

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

# Scanning the million objects of torch and other libraries took nearly half of the time of collection.
gc.disable()


def pytest_collection_finish() -> None:
    """Collect only objects that tests create."""
    gc.freeze()
    gc.enable()
