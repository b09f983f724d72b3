"""A real S3 server and the stores of several nodes on it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollmesh.checkpoints.bucket import open_location
from rollmesh.checkpoints.checkpoint_store import CheckpointStore

from ...kit.checkpoint_samples import SECRET
from ...kit.s3_server import CREDENTIALS, Bucket

pytest.importorskip("s3fs", reason="object stores need the extra s3")
pytest.importorskip("moto", reason="the S3 server of the tests is moto's")


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    server = Bucket(tmp_path_factory.mktemp("moto") / "moto.log")
    yield server
    server.stop()


@pytest.fixture
def node(bucket: Bucket, tmp_path: Path) -> Callable[..., CheckpointStore]:
    """The store as a node sees it: nodes share the bucket, processes of a node its folder, too."""

    def store(name: str, **fields: object) -> CheckpointStore:
        section = bucket.section(tmp_path.name, **fields)
        return open_location(section, tmp_path / name, SECRET)

    return store
