"""Checks of data, verifier and ports at the start of ``rollmesh up`` and in ``config validate``; nothing is written."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rollmesh.config import RunConfig, write_run_config
from rollmesh.config.secrets import inherited_environment, secret_environment
from rollmesh.errors import ConfigError, DataError, RollmeshError, StoreError
from rollmesh.launcher.input_trial import try_inputs
from rollmesh.launcher.method_trial import own_names
from rollmesh.launcher.run_folder import has_launcher
from rollmesh.runtime.addresses import bind_host
from rollmesh.store import TrajectoryStore

TRIAL_SECONDS = 60.0
"""Time limit of the trial; a slower input is checked by its service."""
PORT_SECONDS = 3.0
"""Wait for the port of the agents service to become free."""
_REDIS_SECONDS = 4.0
"""Wait for the server of ``store.url``."""
_POLL_SECONDS = 0.1


def check_inputs(config: RunConfig) -> list[str]:
    """Load the methods, open the prompts, score one row with the verifier, and bind the ports; return notes.

    User code runs in a process of its own. Raises ConfigError or DataError naming field, value and remedy. Pods check
    nothing here: each image holds the libraries, data and code of its own service only.
    """
    if not config.network.shared_folder:
        return []
    # A live run of the same folder has its ports; its lock refuses a second launcher.
    notes = [] if has_launcher(Path(config.folder).resolve()) else _port_notes(config)
    # A part of a composite verifier may be the user's.
    built_in = config.reward.verifier != "composite" and not own_names(config)
    if built_in and all(source.type == "countdown" for source in config.data.sources.values()):
        return [*notes, *try_inputs(config)]
    return [*notes, *_trial_in_a_process(config)]


def _trial_in_a_process(config: RunConfig) -> list[str]:
    with tempfile.TemporaryDirectory(prefix="rollmesh-trial-") as folder:
        run, result, log = Path(folder, "run.yaml"), Path(folder, "result"), Path(folder, "log")
        write_run_config(config, run)
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "rollmesh.launcher.input_trial", str(run), str(result)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**inherited_environment(), **secret_environment(config), "TOKENIZERS_PARALLELISM": "false"},
            )
        try:
            process.wait(timeout=TRIAL_SECONDS)
        except subprocess.TimeoutExpired:
            return [
                f"data and reward.verifier={config.reward.verifier}: one row was not opened and scored within "
                f"{TRIAL_SECONDS:.0f} s, so they are checked by their services"
            ]
        finally:
            # Also the processes that the user's code started.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return _hints_of(result, log, process.returncode, config)


def _hints_of(result: Path, log: Path, status: int, config: RunConfig) -> list[str]:
    """Return the hints of the trial, or raise its error; also that of a trial that its own code ended."""
    if not result.exists():
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "it printed nothing")
        tried = ", ".join(own_names(config)) or f"data.source and reward.verifier={config.reward.verifier}"
        raise ConfigError(f"the trial of {tried} ended its process with status {status}; the last line: {last.strip()}")
    outcome = json.loads(result.read_text(encoding="utf-8"))
    if (error := outcome["error"]) is not None:
        kind: type[RollmeshError] = DataError if error[0] == "DataError" else ConfigError
        raise kind(error[1])
    hints: list[str] = outcome["hints"]
    return hints


def _port_notes(config: RunConfig) -> list[str]:
    """Check addresses and fixed ports; a run without a page goes on.

    Raises ConfigError for an address that no service can bind, and if an agent run would have no API.
    """
    field = "network.host" if config.network.host else "launcher.host"
    fallback = bind_host(config)
    if problem := _taken(fallback, 0):
        raise ConfigError(f"{field}={fallback}: {problem}; set an address of this machine, IPv6 without brackets")
    gateway_host = config.gateway.host or fallback
    agents = config.rollout.program == "agent" and config.agents.enabled is not False
    # A service of a killed launcher may hold the port until it has noticed.
    if agents and (problem := _taken(config.agents.host or gateway_host, config.agents.port, PORT_SECONDS)):
        raise ConfigError(
            f"agents.port={config.agents.port}: {problem}, and this run needs the API; set another port (0 for any) or "
            "agents.host"
        )
    if config.gateway.enabled and (problem := _taken(gateway_host, config.gateway.port)):
        return [
            f"gateway.port={config.gateway.port}: {problem}; the run will have no page: set another port (0 for any), "
            "or gateway.host"
        ]
    return []


def check_redis(config: RunConfig) -> None:
    """Connect to the Redis of ``store.url``. Raises ConfigError if it does not answer, or cannot hold the queue.

    A run that starts waits for it instead.
    """
    url = config.store.url
    if url is None or not config.network.shared_folder:
        return

    async def connect() -> None:
        await (await TrajectoryStore.connect(config.store, config.name, retry_seconds=_REDIS_SECONDS)).aclose()

    try:
        asyncio.run(connect())
    except StoreError as error:
        raise ConfigError(
            f"store.url={url}: {str(error).removeprefix('INFO: ')}; start that server, or correct the address"
        ) from error


def _taken(host: str, port: int, seconds: float = 0.0) -> str:
    """Return the reason why a port (0: any) cannot be bound within ``seconds``; empty if it can."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
                return ""
        except OSError as error:
            if time.monotonic() >= deadline:
                return f"{host} refuses it ({error.strerror})"
            time.sleep(_POLL_SECONDS)
