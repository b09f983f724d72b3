"""``python -m tests.fuzz``: send random requests to a training run."""

from benchmarks.frame import run_command

from . import fuzz

if __name__ == "__main__":
    run_command(fuzz.run, "fuzz", fuzz.__doc__)
