"""A process that records some train steps with Weights & Biases, as a trainer does. Arguments: folder, steps."""

from __future__ import annotations

import sys

from rollmesh.config.load import validate_run_config
from rollmesh.trainer.service.run_log import build_trackers


def main(folder: str, *steps: str) -> None:
    data = {"name": "run", "folder": folder, "model": {"path": "model"}, "telemetry": {"trackers": ["wandb"]}}
    (tracker,) = build_trackers(validate_run_config(data, "made"))
    for step in map(int, steps):
        tracker.log(step, {"loss": 1 / step, "batch/reward": 0.5})
    tracker.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
