"""The outside judge rebuilds weights that a bucket has as deltas, and names the versions of a broken chain."""

import json
import shutil
from pathlib import Path

import pytest

from rollmesh.checkpoints.bucket import BucketStore
from rollmesh.checkpoints.objects import ObjectStore

from ...chaos.judge.files import read_run
from ...chaos.judge.full_weights import delta_count
from ...kit.checkpoint_samples import flip, publish
from ..checkpoints.test_delta_policies import ANCHOR_EVERY, DELTA, WEIGHTS, write_weights

pytestmark = pytest.mark.long

SECRET = "0123456789abcdef" * 4
VERSIONS = 6


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder whose policies are in ``bucket``, a plain folder: versions 0 and 4 in full, the others as deltas."""
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "config.yaml").write_text("{}")
    objects = ObjectStore((tmp_path / "bucket").as_uri(), {"auto_mkdir": True})
    store = BucketStore(tmp_path / "checkpoints", SECRET.encode(), objects, cache_policies=3, anchor_every=ANCHOR_EVERY)
    for version in range(VERSIONS):
        publish(store, version, write=write_weights(version))
    return tmp_path


def folder_of(run: Path, version: int) -> Path:
    (folder,) = (run / "bucket" / "policies").glob(f"{version:08d}-*")
    return folder


def damaged(run: Path) -> list[int]:
    return [policy.train_step for policy in read_run(run, run / "bucket").policies if policy.damage]


def test_the_weights_of_every_version_are_those_of_the_trainer(run: Path) -> None:
    assert delta_count(run / "bucket") == VERSIONS - 2
    assert damaged(run) == []
    for version in range(VERSIONS):
        folder = folder_of(run, version)
        mine = (run / "checkpoints" / "policies" / folder.name / WEIGHTS).read_bytes()
        assert (folder / WEIGHTS).read_bytes() == mine


def test_a_flipped_delta_damages_its_version_and_those_built_on_it(run: Path) -> None:
    delta = folder_of(run, 2) / DELTA
    flip(delta, delta.stat().st_size // 2)
    assert damaged(run) == [2, 3]


def test_a_missing_base_damages_the_versions_up_to_the_next_anchor(run: Path) -> None:
    shutil.rmtree(folder_of(run, 0))
    assert damaged(run) == [1, 2, 3]


def test_another_base_under_the_same_name_is_found(run: Path) -> None:
    """The base is sound by itself, but not the one that the delta names."""
    base = folder_of(run, 0)
    manifest = json.loads((base / "manifest.json").read_bytes())
    (base / "manifest.json").write_text(json.dumps(manifest, indent=1))
    assert damaged(run) == [1, 2, 3]
