"""``python -m tests.chaos``: run the rounds; ``make chaos`` does the same."""

from benchmarks.frame import run_command

from . import chaos

if __name__ == "__main__":
    run_command(chaos.run, "chaos", chaos.__doc__)
