"""Policies that a real S3 stores as differences: readers get the same bytes, or a reason."""

import errno
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from rollmesh.checkpoints import deltas, pulled
from rollmesh.checkpoints.bucket import BucketStore
from rollmesh.checkpoints.manifest import MANIFEST_FILE
from rollmesh.checkpoints.objects import ObjectStore
from rollmesh.config.load import validate_run_config, write_run_config
from rollmesh.errors import CheckpointError, Reason
from rollmesh.report.audit import audit_run
from rollmesh.report.sentences import audit_claims
from rollmesh.trainer.service.policy_catalog import PolicyCatalog, model_folder
from rollmesh.types import PolicyRecord

from ...kit.checkpoint_samples import flip, flip_object, publish, publish_adapter, refused, write_model
from ...kit.s3_server import Bucket
from ..report.made_checkpoints import STEPS, make_audited_run

ANCHOR_EVERY = 4
WEIGHTS, DELTA = "model.safetensors", "model.safetensors.delta"
Node = Callable[..., BucketStore]


def write_weights(version: int, changed_share: float = 0.01, largest: int = 8) -> Callable[[Path], None]:
    """A callable that fills a folder with the version's weights: each version changes low bits of a share of them."""

    def write(folder: Path) -> None:
        write_model()(folder)
        weights = np.random.default_rng(0).integers(0, 1 << 16, (256, 512), dtype=np.uint16)
        for step in range(1, version + 1):
            noise = np.random.default_rng(step)
            changed = noise.random(weights.shape) < changed_share
            weights[changed] ^= noise.integers(1, largest, int(changed.sum()), dtype=np.uint16)
        save_file({"model.embed_tokens.weight": weights.view(np.int16)}, folder / WEIGHTS)

    return write


@pytest.fixture
def trainer(node: Node) -> BucketStore:
    return node("trainer", anchor_every_versions=ANCHOR_EVERY)


def published(trainer: BucketStore, versions: range) -> list[PolicyRecord]:
    return [publish(trainer, version, write=write_weights(version)) for version in versions]


def stored(store: BucketStore, record: PolicyRecord) -> dict[str, int]:
    return {key.rpartition("/")[2]: size for key, size in store.objects.sizes(record.path).items()}


def weights_of(store: BucketStore, record: PolicyRecord) -> bytes:
    return (store.open(record).folder / WEIGHTS).read_bytes()


def refusal(store: BucketStore, record: PolicyRecord) -> CheckpointError:
    return refused(store.open, record)


def watched_pulls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keys of the weights that are pulled, in order."""
    keys: list[str] = []
    get = ObjectStore.get

    def watched(self: ObjectStore, key: str, path: Path) -> None:
        if key.endswith((WEIGHTS, DELTA)):
            keys.append(key)
        get(self, key, path)

    monkeypatch.setattr(ObjectStore, "get", watched)
    return keys


def test_every_fourth_version_is_stored_whole_and_the_others_twenty_times_smaller(trainer: BucketStore) -> None:
    records = published(trainer, range(6))
    for version, record in enumerate(records):
        names = stored(trainer, record)
        assert (WEIGHTS in names, DELTA in names) == (version % ANCHOR_EVERY == 0, version % ANCHOR_EVERY != 0)
    whole = stored(trainer, records[0])[WEIGHTS]
    assert stored(trainer, records[1])[DELTA] * 20 < whole
    assert not list((trainer.root / ".deltas").rglob("*")), "deltas that are uploaded take no space here"


def test_a_reader_that_follows_pulls_deltas_only_and_a_late_one_begins_at_the_anchor(
    node: Node, trainer: BucketStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = published(trainer, range(7))
    follower, late = node("follower"), node("late")
    follower.open(records[0])
    pulled = watched_pulls(monkeypatch)
    for record in records[1:4]:
        assert weights_of(follower, record) == weights_of(trainer, record)
    assert pulled == [f"{record.path}/{DELTA}" for record in records[1:4]]
    pulled.clear()
    assert weights_of(late, records[6]) == weights_of(trainer, records[6])
    assert sorted(pulled) == [f"{records[4].path}/{WEIGHTS}", *(f"{r.path}/{DELTA}" for r in records[5:])]
    assert [folder.name for folder in (late.root / "policies").iterdir()] == [records[6].path.rpartition("/")[2]]


def test_weights_that_changed_everywhere_are_stored_whole(trainer: BucketStore) -> None:
    publish(trainer, 0, write=write_weights(0))
    record = publish(trainer, 1, write=write_weights(1, changed_share=0.9, largest=1 << 16))
    assert WEIGHTS in stored(trainer, record)


def test_a_trainer_that_starts_again_begins_with_whole_weights(node: Node, trainer: BucketStore) -> None:
    published(trainer, range(2))
    again = node("trainer", anchor_every_versions=ANCHOR_EVERY)
    record = publish(again, 2, session="other", write=write_weights(2))
    assert WEIGHTS in stored(again, record)


def test_a_base_that_is_damaged_at_the_trainer_is_not_built_upon(node: Node, trainer: BucketStore) -> None:
    (base,) = published(trainer, range(1))
    flip(trainer.root / base.path / WEIGHTS)
    record = publish(trainer, 1, write=write_weights(1))
    assert WEIGHTS in stored(trainer, record)
    assert weights_of(node("generator"), record) == (trainer.root / record.path / WEIGHTS).read_bytes()


@pytest.mark.parametrize("gone", [0, 1])
@pytest.mark.parametrize("what", ["weights", "all of it"])
def test_a_version_is_stored_whole_after_one_that_has_vanished_from_the_bucket(
    node: Node, trainer: BucketStore, gone: int, what: str
) -> None:
    records = published(trainer, range(2))
    keys = [key for key in trainer.objects.sizes(records[gone].path) if what == "all of it" or WEIGHTS in key]
    trainer.objects.delete(keys)
    record = publish(trainer, 2, write=write_weights(2))
    assert WEIGHTS in stored(trainer, record)
    assert weights_of(node("generator"), record) == (trainer.root / record.path / WEIGHTS).read_bytes()


def test_pruning_keeps_the_chain_of_a_kept_version(node: Node, trainer: BucketStore) -> None:
    records = published(trainer, range(7))
    weights = [weights_of(trainer, record) for record in records]
    for record in records:
        trainer.mark_announced(record)
    removed = trainer.prune(records, keep_last=1, keep_versions=[2], session="abc")
    assert removed == [records[3].path]
    for version in (2, 6):
        assert weights_of(node(f"late-{version}"), records[version]) == weights[version]


def test_a_chain_that_is_torn_reordered_or_of_other_weights_is_refused(node: Node, trainer: BucketStore) -> None:
    records = published(trainer, range(4))
    objects, first, second, third = trainer.objects, *(f"{record.path}/{DELTA}" for record in records[1:])
    whole = {key: objects.read(key, 1 << 30) for key in (first, second, third)}
    objects.write(second, whole[second][: len(whole[second]) // 2])
    assert refusal(node("cut"), records[3]).reason == Reason.TAMPERED
    objects.write(second, whole[third])
    objects.write(third, whole[second])
    assert refusal(node("reordered"), records[2]).reason == Reason.TAMPERED
    objects.write(second, whole[second])
    objects.write(third, whole[third])
    assert weights_of(node("sound"), records[3]) == weights_of(trainer, records[3])
    manifest = f"{records[1].path}/{MANIFEST_FILE}"
    objects.write(manifest, objects.read(f"{records[2].path}/{MANIFEST_FILE}", 1 << 20))
    replaced = refusal(node("replaced"), records[3])
    assert replaced.reason == Reason.TAMPERED and records[1].path in str(replaced)
    objects.delete([manifest])
    assert refusal(node("missing"), records[3]).reason == Reason.MISSING
    assert weights_of(node("before"), records[0]) == weights_of(trainer, records[0])


def test_a_full_disk_while_a_delta_is_applied_is_named_and_leaves_nothing(
    node: Node, trainer: BucketStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = published(trainer, range(3))

    def full(*_: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    reader = node("generator")
    with monkeypatch.context() as patch:
        patch.setattr(deltas, "apply_delta", full)
        assert refusal(reader, records[2]).reason == Reason.DISK_FULL
    assert not list((reader.root / "policies").iterdir())
    assert weights_of(reader, records[2]) == weights_of(trainer, records[2])


def test_the_base_of_adapters_stays_in_the_cache(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, reader = node("trainer"), node("generator", cache_policies=1)
    base = publish(trainer, 0)
    adapters = [publish_adapter(trainer, version, base) for version in range(1, 5)]
    monkeypatch.setattr(pulled, "_IN_USE_SECONDS", -1.0)  # what is not kept is evicted at once
    keys = watched_pulls(monkeypatch)
    for record in adapters:
        assert reader.open(record).base is not None
    assert keys.count(f"{base.path}/{WEIGHTS}") == 1


def test_a_damaged_delta_in_the_bucket_is_found_by_the_comparison_of_copies(trainer: BucketStore) -> None:
    records = published(trainer, range(3))
    assert not trainer.check_copies().damaged
    flip_object(trainer.objects, f"{records[2].path}/{DELTA}", 20)
    assert list(trainer.check_copies().damaged) == [records[2].path]


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
