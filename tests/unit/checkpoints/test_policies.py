"""Published policies: verified byte for byte, refused with the reason; adapters with their base."""

import errno
import hashlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.manifest import MANIFEST_FILE, Manifest
from rollmesh.errors import CheckpointError, Reason
from rollmesh.types import PolicyRecord

from ...kit.checkpoint_samples import CANARY, SECRET, flip, publish, publish_adapter, refused, write_model


def refusal(store: CheckpointStore, record: PolicyRecord, like: Manifest | None = None) -> CheckpointError:
    return refused(store.open, record, like=like)


def test_a_published_policy_opens_with_the_manifest_that_was_written(store: CheckpointStore) -> None:
    record = publish(store, 3, step=2)
    policy = store.open(record)
    manifest = policy.manifest
    assert record.path == "policies/00000002-abc"
    assert (manifest.policy_version, manifest.train_step, manifest.parent, manifest.kind) == (3, 2, 2, "full")
    assert {f.path for f in manifest.files} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert (manifest.dtype, manifest.parameter_count) == ("F32", 128)
    assert manifest.architecture.model_type == "qwen2"
    assert list(manifest.canary) == CANARY
    assert policy.folder == store.root / record.path


def test_a_manifest_that_is_cut_or_changed_anywhere_or_gone_is_refused(store: CheckpointStore) -> None:
    record = publish(store, 0)
    path = store.root / record.path / MANIFEST_FILE
    whole = path.read_bytes()
    for position in range(0, len(whole), 17):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        assert refusal(store, record).reason in (Reason.TORN, Reason.TAMPERED), position
    for length in (*range(0, len(whole), 29), len(whole) - 1):
        path.write_bytes(whole[:length])
        assert refusal(store, record).reason == Reason.TORN, length
    path.unlink()
    assert refusal(store, record).reason == Reason.TORN
    shutil.rmtree(path.parent)
    assert refusal(store, record).reason == Reason.MISSING


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"])
def test_every_file_is_refused_when_missing_truncated_grown_or_flipped(store: CheckpointStore, name: str) -> None:
    record = publish(store, 0)
    path = store.root / record.path / name
    whole = path.read_bytes()
    path.unlink()
    assert refusal(store, record).reason == Reason.MISSING
    for length in (0, 1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert refusal(store, record).reason == Reason.TRUNCATED
    path.write_bytes(whole + b"x")
    assert refusal(store, record).reason == Reason.TRUNCATED
    for position in (0, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x40]) + whole[position + 1 :])
        error = refusal(store, record)
        assert error.reason == Reason.TAMPERED
        assert name in str(error)
    path.write_bytes(whole)
    store.open(record)


def test_a_file_that_the_manifest_does_not_list_is_refused(store: CheckpointStore) -> None:
    record = publish(store, 0)
    (store.root / record.path / "pytorch_model.bin").write_bytes(b"pickle")
    error = refusal(store, record)
    assert error.reason == Reason.TAMPERED
    assert "pytorch_model.bin" in str(error)


def test_a_policy_of_another_run_is_refused_by_its_seal(store: CheckpointStore, tmp_path: Path) -> None:
    foreign = CheckpointStore(store.root, b"the secret of quite another run")
    record = publish(foreign, 0)
    assert refusal(store, record).reason == Reason.TAMPERED
    foreign.open(record)


def test_a_file_that_was_digested_while_it_was_written_is_not_read_again(store: CheckpointStore) -> None:
    def write(folder: Path) -> dict[str, str]:
        write_model()(folder)
        return {"model.safetensors": "a" * 64}

    record = store.publish(session="abc", policy_version=0, train_step=0, parent=None, write=write, canary=list(CANARY))
    with pytest.raises(CheckpointError, match=f"model.safetensors: sha256 .*, expected {'a' * 64}"):
        store.open(record)


def test_a_policy_without_a_canary_is_never_published(store: CheckpointStore) -> None:
    with pytest.raises(ValueError, match="canary"):
        store.publish(session="abc", policy_version=0, train_step=0, parent=None, write=write_model(), canary=[])
    assert store.complete_policies() == [] and not any((store.root / "policies").iterdir())


def test_a_forged_manifest_with_a_matching_record_is_refused(store: CheckpointStore) -> None:
    record = publish(store, 0)
    path = store.root / record.path / MANIFEST_FILE
    data = json.loads(path.read_bytes())
    data["canary"] = data["canary"][:1]
    forged = json.dumps(data).encode()
    path.write_bytes(forged)
    assert refusal(store, replace(record, manifest_digest=hashlib.sha256(forged).hexdigest())).reason == Reason.TAMPERED


def test_a_record_that_names_another_version_is_a_mismatch(store: CheckpointStore) -> None:
    record = publish(store, 1)
    assert refusal(store, replace(record, policy_version=2)).reason == Reason.MISMATCH
    assert refusal(store, replace(record, train_step=2)).reason == Reason.MISMATCH


@pytest.mark.parametrize(
    "path", ["../policies/00000000-abc", "/etc", "", ".", "policies/../../x", "policies//00000000-abc", "a\0b", "a\\b"]
)
def test_a_record_path_cannot_leave_the_store(store: CheckpointStore, path: str) -> None:
    record = publish(store, 0)
    assert refusal(store, replace(record, path=path)).reason == Reason.PATH_ESCAPE


def test_symbolic_links_are_refused_at_every_level(store: CheckpointStore, tmp_path: Path) -> None:
    record = publish(store, 0)
    folder = store.root / record.path
    outside = tmp_path / "outside"
    folder.rename(outside)
    folder.symlink_to(outside)
    assert refusal(store, record).reason == Reason.PATH_ESCAPE
    folder.unlink()
    outside.rename(folder)
    for name in ("model.safetensors", MANIFEST_FILE):
        moved = tmp_path / name
        (folder / name).rename(moved)
        (folder / name).symlink_to(moved)
        assert refusal(store, record).reason == Reason.PATH_ESCAPE
        (folder / name).unlink()
        moved.rename(folder / name)
    store.open(record)


def test_another_architecture_and_another_tokenizer_are_named(store: CheckpointStore) -> None:
    mine = store.open(publish(store, 0)).manifest
    error = refusal(store, publish(store, 1, write=write_model(hidden=16)), like=mine)
    assert error.reason == Reason.FOREIGN_ARCHITECTURE
    assert "hidden_size=16, expected 8" in str(error)
    for version, change in ((2, {"vocabulary": "x y"}), (3, {"template": "{{ messages }}"})):
        other = publish(store, version, write=write_model(**change))
        assert refusal(store, other, mine).reason == Reason.FOREIGN_TOKENIZER
    store.open(publish(store, 4), like=mine)


def test_a_failing_writer_leaves_no_folder_and_can_be_repeated(store: CheckpointStore) -> None:
    def fail(folder: Path) -> None:
        write_model()(folder)
        raise RuntimeError("export failed")

    with pytest.raises(RuntimeError, match="export failed"):
        publish(store, 0, write=fail)
    assert list((store.root / "policies").iterdir()) == []
    store.open(publish(store, 0))


def test_a_session_publishes_a_train_step_once(store: CheckpointStore) -> None:
    record = publish(store, 0)
    with pytest.raises(CheckpointError, match="already"):
        publish(store, 0)
    store.open(record)


@pytest.mark.parametrize("session", ["", "../x", "a/b", "a-b", "a" * 65])
def test_a_session_that_is_no_plain_word_is_refused(store: CheckpointStore, session: str) -> None:
    with pytest.raises(CheckpointError, match="letters and digits"):
        publish(store, 0, session=session)


@pytest.mark.parametrize("missing", ["model.safetensors", "config.json"])
def test_a_folder_without_weights_or_config_is_not_published(store: CheckpointStore, missing: str) -> None:
    def write(folder: Path) -> None:
        write_model()(folder)
        (folder / missing).unlink()

    assert refused(publish, store, 0, write=write).reason == Reason.MISSING


def test_a_policy_is_torn_while_it_is_written(store: CheckpointStore) -> None:
    def write(folder: Path) -> None:
        write_model(0)(folder)
        early = PolicyRecord(policy_version=1, train_step=1, path="policies/00000001-abc", manifest_digest="0" * 64)
        assert refusal(store, early).reason == Reason.TORN
        assert store.complete_policies() == []

    record = publish(store, 1, write=write)
    assert store.complete_policies() == [record]


def test_prune_keeps_the_newest_the_pinned_and_those_in_use(store: CheckpointStore) -> None:
    records = [publish(store, v) for v in range(8)]
    removed = store.prune(records, keep_last=2, keep_versions={0, 3}, session="abc")
    assert removed == [records[v].path for v in (1, 2, 4, 5)]
    for version in (0, 3, 6, 7):
        store.open(records[version])
    assert refusal(store, records[1]).reason == Reason.MISSING
    assert store.prune(records, keep_last=2, keep_versions={0, 3}, session="abc") == []


def test_prune_removes_what_dead_sessions_left_but_not_what_may_still_be_announced(store: CheckpointStore) -> None:
    records = [publish(store, v) for v in range(3)]
    orphan = publish(store, 2, session="dead", step=2)
    mine = publish(store, 3, session="mine", step=2)
    newer = publish(store, 3, session="newer", step=3)
    assert store.prune(records, keep_last=8, keep_versions=(), session="mine") == [orphan.path]
    store.open(mine)
    store.open(newer)


def test_recovery_prefers_the_announced_folder_of_a_version(store: CheckpointStore) -> None:
    first = publish(store, 0)
    announced = publish(store, 1, session="aaa")
    store.mark_announced(announced)
    store.mark_announced(announced)
    publish(store, 1, session="bbb")
    torn = publish(store, 2, session="ccc")
    manifest = store.root / torn.path / MANIFEST_FILE
    manifest.write_bytes(manifest.read_bytes()[:-1])
    assert store.complete_policies() == [first, announced]
    store.open(announced)


def test_a_reader_with_a_read_only_mount_may_be_there_before_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "mount" / "checkpoints"

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as read_only:
        read_only.setattr(os, "mkdir", refuse)
        reader = CheckpointStore(root, SECRET)
    record = publish(CheckpointStore(root, SECRET), 0)

    assert reader.open(record).folder == root / record.path


def test_latest_names_the_newest_announced_policy_and_never_an_older_one(store: CheckpointStore) -> None:
    old, new = publish(store, 0, step=0), publish(store, 1, step=1)
    link = store.root / "latest"
    assert not link.exists()
    store.mark_announced(new)
    store.mark_announced(old)
    assert link.resolve() == store.root / new.path
    assert not os.path.isabs(os.readlink(link))
    store.mark_announced(publish(store, 2, step=1, session="def"))  # a rollback: the same step, a newer version
    assert (link / MANIFEST_FILE).read_bytes() == (
        store.root / "policies" / "00000001-def" / MANIFEST_FILE
    ).read_bytes()


def test_an_adapter_opens_with_its_base(store: CheckpointStore) -> None:
    base = publish(store, 0)
    policy = store.open(publish_adapter(store, 1, base))
    assert policy.base.folder == store.root / base.path
    assert (policy.manifest.kind, policy.base.manifest.kind) == ("adapter", "full")
    assert {f.path for f in policy.manifest.files} == {"adapter_config.json", "adapter_model.safetensors"}
    assert (policy.manifest.dtype, policy.manifest.parameter_count) == ("F32", 32)
    store.open(base).manifest.check_compatible(policy.manifest)


def test_an_adapter_whose_base_changed_or_is_gone_is_refused(store: CheckpointStore) -> None:
    base = publish(store, 0)
    record = publish_adapter(store, 1, base)
    flip(store.root / base.path / "model.safetensors")
    error = refusal(store.at(store.root), record)
    assert error.reason == Reason.TAMPERED
    assert base.path in str(error)
    (store.root / base.path).rename(store.root / "elsewhere")
    assert refusal(store, record).reason == Reason.MISSING
    manifest = store.fetch(record).manifest
    with pytest.raises(ValidationError, match="kind adapter requires a base"):
        Manifest.model_validate({**manifest.model_dump(), "base": None})
