"""Opening of a run's checkpoint store at the location of its run file: a folder, or an object store."""

from __future__ import annotations

from pathlib import Path

from rollmesh.checkpoints.bucket import BucketStore
from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.objects import ObjectStore
from rollmesh.checkpoints.sealing import run_secret
from rollmesh.config import RunConfig
from rollmesh.config.store import CheckpointConfig
from rollmesh.errors import ConfigError
from rollmesh.runtime.health import Waits


def open_checkpoints(config: RunConfig, waits: Waits | None = None) -> CheckpointStore:
    """Open the store of a run file; generate the run's secret if the file has none.

    ``waits`` shows an object store that does not answer.

    Raises ConfigError if the services share no run folder and the location or the secret is missing: each service would
    create its own.
    """
    section = config.checkpoints
    if not config.network.shared_folder:
        for field, example in (("folder", "FOLDER"), ("secret", "SECRET")):
            if not getattr(section, field):
                raise ConfigError(
                    f"checkpoints.{field} is missing: services without a shared run folder (network.shared_folder="
                    f"false) require the same value; set it, for example with ROLLMESH_CHECKPOINTS__{example}"
                )
    folder, given = Path(config.folder), section.secret
    return open_location(section, folder, given.get_secret_value().encode() if given else run_secret(folder), waits)


def open_location(
    section: CheckpointConfig, run_folder: Path, secret: bytes, waits: Waits | None = None
) -> CheckpointStore:
    """Open the store of a run folder with a known secret."""
    if not section.remote:
        return CheckpointStore(Path(section.folder) if section.folder else run_folder / "checkpoints", secret)
    cache = Path(section.cache_folder) if section.cache_folder else run_folder / "checkpoints"
    objects = ObjectStore(str(section.folder), section.object_store, parallel=section.parallel_transfers, waits=waits)
    return BucketStore(
        cache,
        secret,
        objects,
        cache_policies=section.cache_policies,
        anchor_every=section.anchor_every_versions,
    )
