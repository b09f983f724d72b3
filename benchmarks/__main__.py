"""``python -m benchmarks NAME``: run one bench; ``make bench NAME=train ARGS="--json --check"`` does the same."""

import sys

from benchmarks.frame import run_command
from rollmesh.cli.common import clear_errors, heavy_module

BENCHES = {
    "engine": "tokens per CPU second of the torch engine, beside Hugging Face generate",
    "train": "train steps beside padded micro-batches, and with shared prefixes beside those without",
    "trl": "updates of the demo, beside TRL's GRPOTrainer",
    "distil": "30 updates on the demo's trained policy as teacher, beside as many with rewards",
    "agents": "calls of agents in sessions, beside the same calls sent straight to the generator",
    "queue": "full lives of trajectories in the queue, beside a bare Redis stream",
    "reload": "the time from publishing a policy to serving it, and the pause of running calls",
    "scale": "CPU time per finished trajectory of a mesh, at increasing numbers of rollouts in flight",
    "gpu": "sync beside copris_paper on one shared GPU, and the step-time curve of decode",
    "sglang": "the cost of our generator on top of its SGLang server",
    "sim-check": "real runs beside the simulator, which is calibrated on the runs of sync",
}
_HELP = """Usage: python -m benchmarks NAME [OPTIONS]

Measure one part of the mesh beside a named baseline of the same run. The table shows the bars of each measure.
Every bench takes --quick, --json and --check (exit status 1 when a bar is missed); NAME --help shows its own options.
"""


def main() -> None:
    """Run the bench that the command line names; its module is imported here, because most of them load torch."""
    name = sys.argv.pop(1) if len(sys.argv) > 1 else "--help"
    if name not in BENCHES:
        width = max(map(len, BENCHES))
        print(_HELP, *(f"  {bench:{width}}  {text}" for bench, text in BENCHES.items()), sep="\n")
        sys.exit(0 if name in ("-h", "--help") else f"\n{name}: no such bench")
    with clear_errors():
        bench = heavy_module(f"benchmarks.{name.replace('-', '_')}", f"bench {name}")
    run_command(bench.run, f"bench {name}", bench.__doc__)


if __name__ == "__main__":
    main()
