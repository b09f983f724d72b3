"""A copy in the bucket that has rotted beside a good copy on this node: the audit says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from rollmesh.checkpoints.bucket import BucketStore
from rollmesh.checkpoints.objects import ObjectStore
from rollmesh.config.load import validate_run_config, write_run_config
from rollmesh.errors import CheckpointError
from rollmesh.report.audit import audit_run
from rollmesh.report.sentences import audit_claims
from rollmesh.trainer.service.policy_catalog import PolicyCatalog, model_folder

from ...kit.checkpoint_samples import flip_object, publish
from ...kit.s3_server import Bucket
from ..report.made_checkpoints import STEPS, make_audited_run
from .test_delta_policies import WEIGHTS, write_weights


@pytest.fixture
def bucket_run(bucket: Bucket, tmp_path: Path) -> tuple[Path, ObjectStore]:
    """A run whose checkpoints are in a bucket; the folder of this node is a complete cache."""
    run = make_audited_run(tmp_path / "run")
    section = bucket.section(tmp_path.name)
    file = run.folder / "config.yaml"
    data = yaml.safe_load(file.read_text(encoding="utf-8"))
    data.setdefault("checkpoints", {}).update(folder=section.folder, object_store=section.object_store)
    write_run_config(validate_run_config(data, "moved"), file)
    objects = ObjectStore(str(section.folder), section.object_store)
    root = run.store.root
    files = [path for path in root.rglob("*") if path.is_file()]
    objects.put_all([(path, path.relative_to(root).as_posix()) for path in files])
    return run.folder, objects


def test_a_damaged_object_beside_a_good_local_copy_is_a_problem(bucket_run: tuple[Path, ObjectStore]) -> None:
    folder, objects = bucket_run
    before = audit_run(folder)
    assert before.green, before.problems
    copies = 1 + (STEPS + 1) + STEPS
    assert any(claim.startswith(f"bucket: {copies} of its copies (") for claim in audit_claims(before))
    state = next(key for key in objects.sizes(f"states/{STEPS:08d}-s{STEPS}") if key.endswith(".safetensors"))
    policy, manifest, batch = (
        f"policies/{STEPS:08d}-s{STEPS}/model.safetensors",
        f"policies/{STEPS - 1:08d}-s{STEPS - 1}/manifest.json",
        f"batches/{STEPS:08d}.pb",
    )
    for key, at in ((state, -1), (policy, -1), (manifest, 100), (batch, 40)):
        flip_object(objects, key, at)
    after = audit_run(folder)
    assert not after.green
    for key in (state, policy, batch):
        assert any(problem.startswith("the bucket's copy of ") and key in problem for problem in after.problems), key
    assert any(f"copy of {manifest.rpartition('/')[0]} is damaged" in problem for problem in after.problems)


@pytest.mark.parametrize("damaged", ["policy", "base of the difference"])
@pytest.mark.parametrize("gone", [False, True])
def test_a_copy_that_no_other_node_can_read_is_refused_although_this_node_has_a_good_one(
    node: Callable[..., BucketStore], damaged: str, gone: bool
) -> None:
    store = node("trainer", anchor_every_versions=4)
    base, newest = (publish(store, version, write=write_weights(version)) for version in range(2))
    store.check_copy(newest)
    record = newest if damaged == "policy" else base
    (key,) = (key for key in store.objects.sizes(record.path) if WEIGHTS in key)
    if gone:
        store.objects.delete([key])
    else:
        flip_object(store.objects, key)
    store.open(newest)
    with pytest.raises(CheckpointError, match=f"{record.path}: missing, or different") as caught:
        store.check_copy(newest)
    assert not caught.value.passing


def test_a_trainer_of_adapters_does_not_go_on_above_a_base_that_no_other_node_can_read(
    node: Callable[..., BucketStore],
) -> None:
    store = node("trainer")
    base = publish(store, 0)
    config = validate_run_config(
        {"name": "made", "folder": "made", "model": {"path": "recipe:countdown", "adapter": {}}}, "made"
    )
    assert model_folder(config, store) == store.root / base.path
    catalog = PolicyCatalog(store)
    catalog.update([base])
    store.objects.delete(list(store.objects.sizes(base.path)))
    store.open(base)
    with pytest.raises(CheckpointError, match=r"manifest\.json: missing"):
        catalog.base(0)
