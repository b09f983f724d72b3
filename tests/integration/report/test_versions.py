"""Policy versions in the report: their bytes from the manifests, and their lives from the logs."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollmesh.checkpoints.bucket import BucketStore
from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.durable import remove_tree
from rollmesh.checkpoints.objects import ObjectStore
from rollmesh.report.recorded_run import RecordedRun
from rollmesh.report.summary import summarise
from rollmesh.report.versions import VersionLife, version_bytes, version_lives
from rollmesh.report.view.recorded_curves import recorded_curves
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


def write_log(folder: Path, name: str, *events: tuple[str, int | None, float], **fields: Any) -> None:
    """Append these events (name, policy version, seconds) with the fields to a log, and lines that are none."""
    damaged = {"event": "policy_in_service", "policy_version": 1}
    lines = [json.dumps({"event": "other", "timestamp": at(0.0)}), "not JSON"]
    lines += [json.dumps(damaged), json.dumps(damaged | {"timestamp": "2023-11=14T22:13:20"})]
    for event, version, seconds in events:
        lines.append(json.dumps({"event": event, "policy_version": version, "timestamp": at(seconds)} | fields))
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    with (folder / "logs" / name).open("a") as log:
        log.write("\n".join(lines) + "\n")


def at(seconds: float) -> str:
    return datetime.fromtimestamp(1_700_000_000 + seconds, UTC).isoformat()


@pytest.fixture
def run(tmp_path: Path) -> RecordedRun:
    write_log(
        tmp_path,
        "trainer-0.log",
        ("policy_announced", 0, 1.0),
        ("step_trained", 1, 10.0),
        ("policy_announced", 1, 12.0),
        ("step_trained", 2, 20.0),
        ("step_trained", 2, 25.0),
        ("policy_announced", 2, 26.0),
        ("step_trained", 3, 30.0),
        ("step_trained", None, 40.0),
    )
    write_log(tmp_path, "generator-0.log", ("policy_in_service", 0, 2.0), ("policy_in_service", 1, 15.0))
    write_log(tmp_path, "generator-1.log", ("policy_in_service", 1, 13.5))
    write_log(tmp_path, "reward-0.log", ("policy_in_service", 1, 99.0))
    return RecordedRun(tmp_path)


def test_a_life_begins_with_the_newest_copy_and_ends_with_the_last_generator(run: RecordedRun) -> None:
    assert version_lives(run.logs()) == (
        VersionLife(policy_version=1, announced=2.0, first_served=3.5, last_served=5.0),
        VersionLife(policy_version=2, announced=1.0, first_served=None, last_served=None),
    )


@pytest.mark.parametrize(
    ("log", "events", "fields"),
    [
        ("generator-0.log", [("policy_in_service", 1, 90_000.0)], {}),
        ("generator-2.log", [("policy_in_service", 2, 90_001.0)], {"at_start": True}),
        ("trainer-0.log", [("trainer_takes_over", 2, 90_000.0), ("policy_announced", 3, 90_001.0)], {}),
        ("trainer-0.log", [("policy_announced", 2, 90_000.0)], {}),
    ],
    ids=["a pin", "a start", "announced by the next trainer without a copy", "a restored Redis gets it once more"],
)
def test_what_follows_later_is_no_part_of_a_life(
    run: RecordedRun, log: str, events: list[tuple[str, int, float]], fields: dict[str, bool]
) -> None:
    before = version_lives(run.logs())
    write_log(run.path, log, *events, **fields)
    assert version_lives(run.logs()) == before


def test_the_page_draws_the_lives(run: RecordedRun) -> None:
    names = [f"version_{event}" for event in ("announced", "first_served", "last_served")]
    announced, first, last = recorded_curves(run).curves.answer(names, 100).series
    assert (announced.axis, announced.x, announced.mean) == ("policy_version", [1, 2], [2.0, 1.0])
    assert (first.x, first.mean, last.mean) == ([1], [3.5], [5.0])
