"""The newest state, the initial model, and the progress that a state saves."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config

from rollmesh.checkpoints.bucket import open_checkpoints
from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.committed import CommittedState
from rollmesh.config import RunConfig
from rollmesh.config.recipes import resolve_model
from rollmesh.errors import CheckpointError, ConfigError, Reason
from rollmesh.trainer.learner.distributed import World
from rollmesh.trainer.learner.policy_trainer import PolicyTrainer
from rollmesh.trainer.learner.train_step import trailing_skipped
from rollmesh.trainer.main import build_ranks
from rollmesh.trainer.service.policy_catalog import PolicyCatalog
from rollmesh.trainer.service.ranks import RankCoordinator
from rollmesh.trainer.service.trainer_progress import Progress, load_newest_state

from ....kit.checkpoint_samples import CURSOR, SECRET, make_batch, publish, write_batch
from ....kit.made_batches import SHAPE, write_random_model
from ....kit.run_files import made_run


class AwayStore(CheckpointStore):
    """A store whose states cannot be pulled."""

    def load_state(self, state: CommittedState, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        raise CheckpointError("the store cannot be reached", reason=Reason.UNREACHABLE)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    model = tmp_path_factory.mktemp("model")
    write_random_model(model)
    return made_run("run", model={"path": str(model)})


def ranks(config: RunConfig, store: CheckpointStore) -> RankCoordinator:
    """One rank, with the initial model."""
    trainer = PolicyTrainer(config.model.path, config.trainer, device="cpu")
    return RankCoordinator(trainer, World(), store, PolicyCatalog(store))


def saved(config: RunConfig, store: CheckpointStore, *steps: int, rollbacks: int = 0) -> list[CommittedState]:
    """Committed states of these train steps, whose batch files are written too."""
    saving = ranks(config, store)
    states = []
    for step in steps:
        write_batch(store, make_batch(step), CURSOR)
        saving.trainer.train_step = step
        states.append(saving.save(f"abc{step}", rollbacks, Progress(trained_token_total=step).to_extra()))
    return states


def damage(state: CommittedState) -> None:
    """Flip the last byte of the tensors, which leaves the size as recorded."""
    (shard,) = state.folder.glob("*.safetensors")
    data = shard.read_bytes()
    shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def test_a_state_that_cannot_be_reached_never_gives_way_to_the_initial_model(config: RunConfig, tmp_path: Path) -> None:
    saved(config, CheckpointStore(tmp_path, SECRET), 1)
    away = AwayStore(tmp_path, SECRET)
    with pytest.raises(CheckpointError, match="cannot be reached") as caught:
        load_newest_state(ranks(config, away), away, config)
    assert caught.value.passing, "the caller waits and tries again"


def test_a_state_of_another_model_or_optimizer_is_a_wrong_setting(config: RunConfig, tmp_path: Path) -> None:
    store, other = CheckpointStore(tmp_path / "store", SECRET), tmp_path / "model"
    saved(config, store, 1)
    write_random_model(other, config=Qwen2Config(**SHAPE | {"hidden_size": 64}, tie_word_embeddings=True))
    changed = config.model_copy(update={"model": config.model.model_copy(update={"path": str(other)})})
    with pytest.raises(ConfigError, match=rf"trainer\.optimizer=adamw, model\.path={other}: the newest trainer state"):
        load_newest_state(ranks(changed, store), store, changed)


def test_a_damaged_state_gives_way_to_the_one_before(config: RunConfig, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, SECRET)
    damage(saved(config, store, 1, 2)[1])
    restarted = ranks(config, store)
    assert load_newest_state(restarted, store, config).trained_token_total == 1
    assert restarted.trainer.train_step == 1


def test_damaged_states_give_way_to_the_initial_model_only_if_every_batch_can_be_replayed(
    config: RunConfig, tmp_path: Path
) -> None:
    store = CheckpointStore(tmp_path, SECRET)
    for state in saved(config, store, 1, 2):
        damage(state)
    restarted = ranks(config, store)
    assert load_newest_state(restarted, store, config) == Progress()
    assert restarted.trainer.train_step == 0
    (tmp_path / "batches" / "00000001.pb").unlink()
    with pytest.raises(CheckpointError, match="no trainer state can be read .* train step 1 cannot be replayed: "):
        load_newest_state(restarted, store, config)


def test_damaged_states_never_undo_a_rollback(config: RunConfig, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, SECRET)
    (state,) = saved(config, store, 1, rollbacks=1)
    (state.folder / "COMMITTED").write_bytes(b"{")
    assert load_newest_state(ranks(config, store), store, config) == Progress(), "nothing tells of a rollback"
    publish(store, 3, session="abcr1")
    with pytest.raises(CheckpointError, match="would undo a rollback"):
        load_newest_state(ranks(config, store), store, config)


def test_a_state_of_before_a_rollback_never_takes_the_place_of_a_damaged_one(config: RunConfig, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, SECRET)
    saved(config, store, 1)
    (state,) = saved(config, store, 2, rollbacks=1)
    publish(store, 3, session="abcr1")
    assert load_newest_state(ranks(config, store), store, config).trained_token_total == 2, "nothing is damaged"
    (state.folder / "COMMITTED").write_bytes(b"{")
    restarted = ranks(config, store)
    with pytest.raises(
        CheckpointError, match="00000001-abc1: .* policy version 3 .* undo .* damaged: .*/00000002-abc2/"
    ):
        load_newest_state(restarted, store, config)
    assert restarted.trainer.train_step == 0, "nothing is loaded"


def test_a_new_run_and_one_without_a_state_begin_with_the_initial_model(config: RunConfig, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, SECRET)
    assert load_newest_state(ranks(config, store), store, config) == Progress()
    write_batch(store, make_batch(1), CURSOR)
    write_batch(store, make_batch(2), CURSOR)
    (tmp_path / "batches" / "00000002.pb").write_bytes(b"half of the newest one")
    assert load_newest_state(ranks(config, store), store, config) == Progress()
    (tmp_path / "batches" / "00000001.pb").write_bytes(b"half of one that was trained")
    with pytest.raises(CheckpointError, match="none is there.* train step 1 cannot be replayed: "):
        load_newest_state(ranks(config, store), store, config)


def test_another_secret_is_named_and_is_no_reason_to_start_again(config: RunConfig, tmp_path: Path) -> None:
    saved(config, CheckpointStore(tmp_path, SECRET), 1)
    foreign = CheckpointStore(tmp_path, b"another secret of thirty-two byte")
    with pytest.raises(CheckpointError, match=r"checkpoints\.secret \(or ROLLMESH_CHECKPOINTS__SECRET\)") as caught:
        load_newest_state(ranks(config, foreign), foreign, config)
    assert caught.value.final, "the process ends as with a wrong setting"


@pytest.mark.parametrize(
    ("made", "trailing"), [([True], 0), ([False, True], 0), ([True, False, False], 2), ([False, False], 2)]
)
def test_updates_after_the_last_one_that_was_made_are_counted(made: list[bool], trailing: int) -> None:
    assert trailing_skipped(made) == trailing


def test_a_row_of_skipped_updates_goes_over_train_steps_and_restarts_and_ends_with_an_update() -> None:
    progress = Progress()
    for step in ([True, False], [False, False], [False]):
        progress = Progress.from_extra(progress.to_extra())
        progress.count_updates(step.count(True), trailing_skipped(step))
    assert progress.nonfinite_updates_in_a_row == 4
    progress.count_updates(1, trailing_skipped([True, False]))
    assert progress.nonfinite_updates_in_a_row == 1


def test_a_torn_initial_model_is_named_with_its_field(tmp_path: Path) -> None:
    torn = shutil.copytree(resolve_model("recipe:countdown"), tmp_path / "torn")
    (torn / "model.safetensors").write_bytes((torn / "model.safetensors").read_bytes()[:1000])
    config = made_run(tmp_path / "run", model={"path": str(torn)})
    with pytest.raises(ConfigError, match=f"model.path={torn}: .* not a loadable causal LM"):
        build_ranks(config, open_checkpoints(config))
