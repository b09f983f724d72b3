"""The report tells the bytes of every version whose manifest the run folder has, and why one has none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import yaml

from rollmesh.checkpoints.bucket import BucketStore
from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.durable import remove_tree
from rollmesh.checkpoints.objects import ObjectStore
from rollmesh.report.recorded_run import RecordedRun
from rollmesh.report.summary import summarise
from rollmesh.report.versions import version_bytes
from rollmesh.report.view.recorded_overview import run_result
from rollmesh.types import PolicyRecord

from ...kit.checkpoint_samples import SECRET, publish, publish_adapter
from ..checkpoints.test_delta_policies import write_weights


def size(store: CheckpointStore, record: PolicyRecord) -> str:
    """Bytes of the files in a policy's folder, without its manifest and marker."""
    files = [f for f in (store.root / record.path).rglob("*") if f.name not in ("manifest.json", "ANNOUNCED")]
    return f"{sum(file.stat().st_size for file in files):,}"


def test_the_table_of_versions_has_their_bytes_and_names_those_without_a_folder(
    tmp_path: Path, make_run: Callable[..., Path]
) -> None:
    folder = make_run(tmp_path / "run", steps=4)
    store = CheckpointStore(folder / "checkpoints", SECRET)
    base = publish(store, 0)
    adapters = [publish_adapter(store, version, base) for version in (1, 2, 3)]
    remove_tree(store.root / adapters[0].path)

    run = RecordedRun(folder)
    (versions,) = (table for table in run_result(run, summarise(run), report=False).tables if table.name == "versions")
    cells = {int(row[0]): row[1] for row in versions.rows}

    assert cells == {
        0: size(store, base),
        1: "not kept or unreadable",
        2: f"{size(store, adapters[1])} (adapter)",
        3: f"{size(store, adapters[2])} (adapter)",
        4: "",  # trained, and never published
    }


def test_the_announced_folder_of_a_version_counts(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", SECRET)
    announced = publish(store, 1, session="aa", write=write_weights(1))
    store.mark_announced(announced)
    publish(store, 1, session="bb")
    (store.root / publish(store, 2).path / "manifest.json").write_text("{", encoding="utf-8")

    assert version_bytes(RecordedRun(tmp_path)) == {0: "not kept or unreadable", 1: size(store, announced)}


def test_a_delta_tells_what_the_object_store_got_and_an_evicted_version_is_not_called_pruned(
    tmp_path: Path, make_run: Callable[..., Path]
) -> None:
    folder = make_run(tmp_path / "run", steps=2)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["checkpoints"] |= {"folder": "s3://bucket/run", "anchor_every_versions": 4}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    objects = ObjectStore((tmp_path / "bucket").as_uri(), {"auto_mkdir": True})
    store = BucketStore(folder / "checkpoints", SECRET, objects, cache_policies=9, anchor_every=4)
    records = [publish(store, version, write=write_weights(version)) for version in range(3)]
    uploaded = [s for key, s in objects.sizes(records[2].path).items() if not key.endswith("manifest.json")]
    remove_tree(store.root / records[0].path)

    found = version_bytes(RecordedRun(folder))

    assert found[0] == "not in this cache"
    assert found[2] == f"{size(store, records[2])} ({sum(uploaded):,} uploaded, as a delta)"
