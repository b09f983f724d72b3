"""Policies, batch files and states in a real S3: what one node writes another one reads, whole or not at all."""

import errno
import fcntl
import io
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rollmesh.checkpoints.batches import batch_path
from rollmesh.checkpoints.bucket import BucketStore
from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.committed import CommittedState
from rollmesh.checkpoints.manifest import MANIFEST_FILE
from rollmesh.checkpoints.objects import ObjectStore
from rollmesh.errors import CheckpointError, ConfigError, Reason
from rollmesh.types import PolicyRecord

from ...kit.checkpoint_samples import (
    CURSOR,
    SECRET,
    flip,
    flip_object,
    make_batch,
    publish,
    refused,
    step_settings,
    write_batch,
)
from ...kit.ledger import read_ledger
from ...kit.s3_server import Bucket

Node = Callable[..., CheckpointStore]


def refusal(store: CheckpointStore, record: PolicyRecord) -> str:
    return refused(store.open, record).reason


def objects(store: CheckpointStore) -> ObjectStore:
    assert isinstance(store, BucketStore)
    return store.objects


def away(self: ObjectStore, source: Path, key: str) -> bool:
    raise CheckpointError("away", reason=Reason.UNREACHABLE)


def act_before_the_next_batch(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
    """Let another trainer act before the bucket gets the next batch file."""
    put_new = ObjectStore.put_new

    def overtaken(self: ObjectStore, source: Path, key: str) -> bool:
        monkeypatch.setattr(ObjectStore, "put_new", put_new)
        action()
        return put_new(self, source, key)

    monkeypatch.setattr(ObjectStore, "put_new", overtaken)


def test_another_node_opens_a_policy_without_a_listing_and_keeps_it(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = publish(node("trainer"), 3, step=2)
    reader = node("generator")
    monkeypatch.setattr(ObjectStore, "sizes", lambda *_: pytest.fail("a reader lists"))
    policy = reader.open(record)
    assert policy.folder == reader.root / record.path
    assert policy.manifest.policy_version == 3
    assert (policy.folder / "model.safetensors").read_bytes() == (
        node("trainer").root / record.path / "model.safetensors"
    ).read_bytes()
    for call in ("read", "get"):
        monkeypatch.setattr(ObjectStore, call, lambda *_: pytest.fail("the bucket is asked for what is here"))
    assert reader.open(record).folder == policy.folder


def test_a_writer_that_dies_half_way_leaves_nothing_that_can_be_read(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, put = node("trainer"), ObjectStore.put

    def dies(self: ObjectStore, source: Path, key: str) -> None:
        if key.endswith(MANIFEST_FILE):
            raise KeyboardInterrupt
        put(self, source, key)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(ObjectStore, "put", dies)
        publish(writer, 0)
    assert any(key.endswith("model.safetensors") for key in objects(writer).sizes("policies"))
    assert writer.complete_policies() == []
    record = publish(writer, 0)  # the same session tries again
    assert node("generator").open(record).manifest.policy_version == 0
    assert [r.path for r in node("new").complete_policies()] == [record.path]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda o, path: o.delete([f"{path}/{MANIFEST_FILE}"]), Reason.MISSING),
        (lambda o, path: o.delete([f"{path}/model.safetensors"]), Reason.MISSING),
        (lambda o, path: o.write(f"{path}/config.json", b"{}"), Reason.TRUNCATED),
        (lambda o, path: o.write(f"{path}/{MANIFEST_FILE}", b"{"), Reason.TORN),
    ],
)
def test_what_is_damaged_in_the_bucket_is_refused_with_the_reason(
    node: Node, damage: Callable[[ObjectStore, str], None], reason: Reason
) -> None:
    writer = node("trainer")
    record = publish(writer, 0)
    damage(objects(writer), record.path)
    assert refusal(node("generator"), record) == reason


def test_a_damaged_copy_of_a_node_is_pulled_again(node: Node) -> None:
    record = publish(node("trainer"), 0)
    reader = node("generator")
    file = reader.open(record).folder / "model.safetensors"
    content = file.read_bytes()
    flip(file)
    reader.open(record)
    assert file.read_bytes() == content


def test_the_processes_of_a_node_pull_a_policy_once_and_a_few_files_at_a_time(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = publish(node("trainer"), 0)
    get, pulled, busy, most, lock = ObjectStore.get, Counter[str](), 0, 0, threading.Lock()

    def counted(self: ObjectStore, key: str, target: Path) -> None:
        nonlocal busy, most
        with lock:
            pulled[key] += 1
            busy += 1
            most = max(most, busy)
        get(self, key, target)
        with lock:
            busy -= 1

    monkeypatch.setattr(ObjectStore, "get", counted)
    stores = [node("generators", parallel_transfers=2) for _ in range(4)]
    threads = [threading.Thread(target=store.open, args=(record,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (stores[0].root / record.path / MANIFEST_FILE).exists()
    assert set(pulled.values()) == {1} and len(pulled) == 5
    assert most <= 2


def test_a_node_removes_policies_that_were_not_used_for_long(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, reader = node("trainer"), node("generator", cache_policies=2)
    records = [publish(writer, version) for version in range(4)]
    for record in records[:3]:
        reader.open(record)
    assert all((reader.root / record.path).exists() for record in records[:3])
    monkeypatch.setattr("rollmesh.checkpoints.pulled._IN_USE_SECONDS", -1.0)
    reader.open(records[3])
    assert [(reader.root / record.path).exists() for record in records] == [False, False, True, True]
    # Nor do their locks pile up over the thousands of versions of a run.
    names = {record.path.rpartition("/")[2] for record in records[2:]}
    assert {lock.name for lock in (reader.root / ".pulls").iterdir()} == names
    assert reader.open(records[0]).manifest.policy_version == 0


def test_what_killed_processes_have_pulled_of_a_policy_is_deleted_by_the_next_pull(node: Node) -> None:
    first, second, third = (publish(node("trainer"), version) for version in range(3))
    reader = node("generator")
    reader.open(first)
    locks, names = reader.root / ".pulls", [record.path.rpartition("/")[2] for record in (first, second, third)]
    left = [reader.root / "policies" / f".{name}.0011" for name in names]
    for folder in left:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
    with (locks / names[2]).open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        reader.open(second)
        assert [folder.exists() for folder in left] == [False, False, True], "another process pulls the third one"
    assert (reader.root / first.path).exists() and (reader.root / second.path).exists()
    reader.open(first)
    assert not left[2].exists()
    assert {lock.name for lock in locks.iterdir()} == set(names[:2])


def test_a_lock_that_was_removed_during_a_wait_is_taken_again(node: Node) -> None:
    record = publish(node("trainer"), 0)
    waiting = node("generator")
    lock = waiting.root / ".pulls" / record.path.rpartition("/")[2]
    lock.parent.mkdir()
    with lock.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        opened = threading.Thread(target=waiting.open, args=(record,))
        opened.start()
        assert opened.is_alive() and not (waiting.root / record.path).exists()
        lock.unlink()
    opened.join(60)
    assert (waiting.root / record.path / MANIFEST_FILE).exists()
    assert lock.exists(), "the lock in force is the one that others find"


def test_pruning_takes_old_policies_out_of_the_bucket(node: Node) -> None:
    writer = node("trainer")
    records = [publish(writer, version) for version in range(4)]
    for record in records:
        writer.mark_announced(record)
    removed = writer.prune(records, keep_last=1, keep_versions=[1], session="abc")
    assert removed == [records[0].path, records[2].path]
    assert [r.policy_version for r in node("other").complete_policies(announced_only=True)] == [1, 3]
    assert refusal(node("other"), records[0]) == Reason.MISSING


def test_a_batch_file_counts_once_the_bucket_has_it(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = node("trainer")
    digest = write_batch(writer, make_batch(1), CURSOR)
    other = node("other")
    assert other.batch_steps() == [1]
    assert other.batch_footer(1).payload_sha256 == digest
    assert not (other.root / "batches").exists()  # a footer is read without the trajectories
    assert [g.group_id for g in other.read_batch(1).groups] == ["e0-2", "e0-3"]
    with monkeypatch.context() as patched, pytest.raises(CheckpointError, match="away"):
        patched.setattr(ObjectStore, "put_new", away)
        write_batch(writer, make_batch(2, ["e0-7", "e0-8"]), CURSOR)
    assert writer.batch_steps() == [1]
    # Another trainer cuts the step again; the file that was never uploaded does not block it.
    assert write_batch(writer, make_batch(2), CURSOR) == node("third").batch_footer(2).payload_sha256
    with pytest.raises(CheckpointError, match="already has a batch of other groups"):
        write_batch(node("late"), make_batch(2, ["e0-7", "e0-8"]), CURSOR)


def test_a_batch_file_that_never_left_its_node_is_not_what_a_replay_there_trains_on(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched, pytest.raises(CheckpointError, match="away"):
        patched.setattr(ObjectStore, "put_new", away)
        write_batch(node("first"), make_batch(1, ["e0-7", "e0-8"]), CURSOR)
    assert batch_path(node("first").root, 1).exists()
    write_batch(node("second"), make_batch(1), CURSOR)
    again = node("first")
    assert [g.group_id for g in again.read_batch(1).groups] == ["e0-2", "e0-3"]
    assert again.read_group(1, "e0-7") is None


def test_of_two_trainers_that_write_a_step_at_once_the_first_one_counts(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    act_before_the_next_batch(monkeypatch, lambda: write_batch(node("newer"), make_batch(1), CURSOR))
    late = make_batch(1, ["e0-7", "e0-8"])
    assert refused(write_batch, node("older"), late, CURSOR).reason == Reason.MISMATCH
    assert [g.group_id for g in node("older").read_batch(1).groups] == ["e0-2", "e0-3"]
    # An answer that was lost on the way: the same batch is written again, and that is fine.
    assert write_batch(node("newer"), make_batch(1), CURSOR) == node("older").batch_footer(1).payload_sha256


def test_of_two_trainers_with_the_same_groups_the_settings_of_the_first_one_count(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (step_settings(rate) for rate in (1e-3, 1e-4))
    act_before_the_next_batch(monkeypatch, lambda: write_batch(node("first"), make_batch(1), CURSOR, settings=first))
    late = node("late")
    write_batch(late, make_batch(1), CURSOR, settings=second)
    assert late.stored_batch(1).footer == node("other").batch_footer(1)
    assert node("late").stored_batch(1).footer.settings == first, "a replay after a restart"


def test_a_batch_file_whose_footer_cannot_be_read_for_now_is_not_replaced(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise ConnectionResetError("connection reset by peer")

    def write_first() -> None:
        write_batch(node("first"), make_batch(1), CURSOR)
        patched.setattr(ObjectStore, "open", lambda *_: Interrupted(bytes(1000)))

    with monkeypatch.context() as patched:
        act_before_the_next_batch(patched, write_first)
        error = refused(write_batch, node("late"), make_batch(1, ["e0-7", "e0-8"]), CURSOR)
    assert error.reason == Reason.UNREACHABLE
    assert node("other").batch_footer(1).group_ids == ["e0-2", "e0-3"]


def test_a_damaged_batch_file_of_a_node_is_pulled_again_and_one_of_the_bucket_is_replaced(node: Node) -> None:
    writer = node("trainer")
    digest = write_batch(writer, make_batch(1), CURSOR)
    flip(batch_path(writer.root, 1), 40)
    assert [g.group_id for g in writer.read_batch(1).groups] == ["e0-2", "e0-3"]
    objects(writer).write("batches/00000001.pb", b"torn")
    assert write_batch(writer, make_batch(1), CURSOR) == digest == node("other").batch_footer(1).payload_sha256


def test_a_batch_file_that_is_here_already_is_not_pulled_again(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    write_batch(node("trainer"), make_batch(1), CURSOR)
    monkeypatch.setattr(ObjectStore, "get", lambda *_: pytest.fail("it is pulled again"))
    assert len(node("trainer").read_batch(1).groups) == 2


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"weight": torch.randn(4, 3, generator=generator), "step": torch.tensor(float(seed))}


def loaded(store: CheckpointStore) -> CommittedState:
    """Load the newest state, which is of step 1, and compare it."""
    state = store.latest_committed()
    assert state is not None and state.train_step == 1
    empty = {name: torch.zeros_like(t) for name, t in tensors(1).items()}
    assert store.load_state(state, empty) == {"lr_step": 1}
    assert all(torch.equal(empty[name], t) for name, t in tensors(1).items())
    return state


def save(store: CheckpointStore, step: int) -> None:
    store.save_state(session="abc", train_step=step, rollback_count=0, tensors=tensors(step), extra={"lr_step": step})


def test_a_state_is_loaded_on_another_node_and_counts_only_when_all_of_it_got_there(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = node("trainer")
    save(writer, 1)
    put = ObjectStore.put

    def refuses(self: ObjectStore, source: Path, key: str) -> None:
        (away if key.endswith("COMMITTED") else put)(self, source, key)

    with monkeypatch.context() as patched, pytest.raises(CheckpointError, match="away"):
        patched.setattr(ObjectStore, "put", refuses)
        save(writer, 2)
    for store in (writer, node("other")):
        loaded(store)
    save(writer, 2)
    write_batch(writer, make_batch(1), CURSOR)
    write_batch(writer, make_batch(2), CURSOR)
    writer.prune_states(keep_last=1, session="abc")
    assert [state.train_step for state in node("third").committed_states()] == [2]
    ledger = read_ledger(node("third"))
    assert (ledger.committed_step, ledger.damaged, sorted(ledger.groups)) == (2, {}, [1, 2])


def test_a_damaged_copy_of_a_state_is_pulled_again(node: Node) -> None:
    save(node("trainer"), 1)
    store = node("other")
    (file,) = loaded(store).folder.glob("*.safetensors")
    content = file.read_bytes()
    flip(file)
    loaded(store)
    assert file.read_bytes() == content


def test_a_state_that_is_damaged_in_the_bucket_is_refused_with_the_reason(node: Node) -> None:
    writer = node("trainer")
    save(writer, 1)
    (key,) = (key for key in objects(writer).sizes("states") if key.endswith(".safetensors"))
    flip_object(objects(writer), key)
    assert refused(loaded, node("other")).reason == Reason.TAMPERED


def test_nodes_agree_on_the_identity_of_the_store(node: Node) -> None:
    assert node("trainer").lineage() == node("gateway").lineage() != ""


def test_an_unreachable_store_is_waited_for_and_then_named(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ObjectStore(f"s3://{bucket.name}/x", {"endpoint_url": bucket.url}, retry_seconds=20.0)
    tries, pipe = [], store._files.pipe_file

    def fails_twice(path: str, data: bytes) -> None:
        tries.append(path)
        if len(tries) < 3:
            raise ConnectionResetError("connection reset by peer")
        pipe(path, data)

    monkeypatch.setattr(store._files, "pipe_file", fails_twice)
    store.write("key", b"value")
    assert len(tries) == 3 and store.read("key", 100) == b"value"

    unreachable = ObjectStore("s3://nowhere/x", {"endpoint_url": "http://127.0.0.1:9"}, retry_seconds=0.5)
    error = refused(unreachable.write, "key", b"value")
    assert "s3://nowhere/x: writing key failed" in str(error)
    assert error.reason == Reason.UNREACHABLE


def test_a_full_disk_of_the_node_is_named_at_once_and_is_no_outage(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ObjectStore(f"s3://{bucket.name}/x", {"endpoint_url": bucket.url})
    tries = []

    def full(path: str, target: str) -> None:
        tries.append(path)
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(store._files, "get_file", full)
    error = refused(store.get, "key", tmp_path / "key")
    assert "disk full while writing a copy of key, " in str(error)
    assert (error.reason, len(tries)) == (Reason.DISK_FULL, 1)
    assert list(tmp_path.iterdir()) == []


def test_ranks_on_several_nodes_are_refused_at_startup(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(ConfigError, match="16 ranks, 8 here"):
        node("trainer")


def test_the_bucket_holds_the_same_files_as_a_folder_would(node: Node, tmp_path: Path) -> None:
    mirrored, plain = node("trainer"), CheckpointStore(tmp_path / "plain", SECRET)
    for store in (mirrored, plain):
        store.mark_announced(publish(store, 0))
        write_batch(store, make_batch(1), CURSOR)
        save(store, 1)
    here = {f.relative_to(plain.root).as_posix() for f in plain.root.rglob("*") if f.is_file()}
    assert {key for kind in ("policies", "batches", "states") for key in objects(mirrored).sizes(kind)} == here
