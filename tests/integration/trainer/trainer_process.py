"""Run as a script by the tests: the trainer service and nothing else. Usage: trainer_process.py RUN.yaml"""

from __future__ import annotations

import sys

import torch

from rollmesh.config import load_run_config
from rollmesh.runtime.lifecycle import Shutdown, run_service
from rollmesh.runtime.logging import configure_logging
from rollmesh.trainer.main import serve

if __name__ == "__main__":
    torch.set_num_threads(1)
    config = load_run_config(sys.argv[1])
    configure_logging(config.telemetry, service="trainer-0", run=config.name)

    async def main(shutdown: Shutdown) -> None:
        await serve(config, 0, shutdown)

    sys.exit(run_service(main))
