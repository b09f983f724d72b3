"""``rollmesh eval`` with other data or settings: a mesh of its own, of which the run and its queue see nothing.

Only the checkpoints and their secret are those of the run, so a run in progress may be evaluated, and the folder of a
run that has lost its Redis.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from rollmesh.checkpoints.sealing import SECRET_FILE
from rollmesh.config import RunConfig, load_run_config, text_override
from rollmesh.config.data import JsonlSource
from rollmesh.config.recipes import resolve_model
from rollmesh.config.store import StoreConfig
from rollmesh.errors import ConfigError
from rollmesh.launcher.evaluation_journal import Evaluation
from rollmesh.launcher.evaluations import WITHOUT_TRAINER, evaluate_version, refuse_agents
from rollmesh.launcher.local_mesh import LocalMesh, local_mesh
from rollmesh.launcher.run_folder import RunFolder, locked_run_folder
from rollmesh.report.model_export import published_record
from rollmesh.report.recorded_run import RecordedRun
from rollmesh.tasks.sources.source_protocol import build_prompt_source
from rollmesh.text import Tokenizer
from rollmesh.types import PolicyRecord

_PARQUET = (".parquet", ".pq")


def source_of(config: RunConfig, file: Path) -> dict[str, Any]:
    """Return the evaluation source for a file of prompts, with the fields of the run's own table if it has one."""
    own = next((s for s in (config.data.evaluation_source, config.data.source) if isinstance(s, JsonlSource)), None)
    kind = "parquet" if file.suffix in _PARQUET else "jsonl"
    return (own.model_dump() if own is not None else {}) | {"type": kind, "path": str(file.resolve())}


async def evaluate_beside(
    run: RunFolder, overrides: Sequence[str], version: int | None, shutdown: asyncio.Event, console: Console
) -> Evaluation:
    """Evaluate a policy version (None: the newest) of a run with fields of its run file replaced.

    Raises ConfigError or DataError for fields and prompts that no evaluation can use, before anything is started.
    """
    record = published_record(RecordedRun(run.path), version)
    with _folder(run) as scratch:
        config = _config(run, scratch, overrides)
        refuse_agents(config)
        await asyncio.to_thread(_try_prompts, config)
        if (secret := run.path / SECRET_FILE).exists():
            shutil.copyfile(secret, scratch / SECRET_FILE)
        with locked_run_folder(config) as folder:
            async with local_mesh(config, folder, shutdown, console) as mesh:
                await _announce(mesh, record)
                async with mesh.services(WITHOUT_TRAINER):
                    await mesh.until_serving()
                    return await evaluate_version(mesh, record.policy_version)


@contextlib.contextmanager
def _folder(run: RunFolder) -> Iterator[Path]:
    """Make a folder inside the run folder, and remove it unless the evaluation fails: then its logs stay."""
    scratch = Path(tempfile.mkdtemp(prefix="evaluation-", dir=run.path))
    try:
        yield scratch
    except BaseException:
        if not any((scratch / "logs").glob("*.log")):
            shutil.rmtree(scratch, ignore_errors=True)
        raise
    shutil.rmtree(scratch, ignore_errors=True)


def _config(run: RunFolder, scratch: Path, overrides: Sequence[str]) -> RunConfig:
    """Return the run file of the evaluation: the run's with the overrides, its own folder, and an embedded server."""
    own = load_run_config(run.config_file)
    place = own.checkpoints
    if not place.remote:
        place = place.model_copy(update={"folder": place.folder or str(run.path / "checkpoints")})
    elif place.cache_folder is None:
        place = place.model_copy(update={"cache_folder": str(run.path / "checkpoints")})
    config = load_run_config(run.config_file, [*overrides, text_override("folder", scratch)])
    store = StoreConfig(
        heartbeat_seconds=own.store.heartbeat_seconds, session_ttl_seconds=own.store.session_ttl_seconds
    )
    return config.model_copy(update={"checkpoints": place, "store": store})


def _try_prompts(config: RunConfig) -> None:
    """Open the prompts. Raises ConfigError or DataError if there are none."""
    tokenizer = Tokenizer(resolve_model(config.model.path))
    if not build_prompt_source(config.data, tokenizer, config.evaluation.seed, "eval").epoch_size:
        raise ConfigError("data.evaluation_source: no prompts; give a file with rows")


async def _announce(mesh: LocalMesh, record: PolicyRecord) -> None:
    """Register the policy under its number. Versions before it have its weights: no generator loads them."""
    session = await mesh.store.training.open_session("evaluation")
    for number in range(record.policy_version + 1):
        await mesh.store.policies.announce(session, replace(record, policy_version=number))
    await mesh.store.training.close_session(session)
