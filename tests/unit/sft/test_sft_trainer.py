"""Loss and updates are those of transformers and torch, computed without packing; the order of the rows."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, get_scheduler

from rollmesh.config.recipes import resolve_model
from rollmesh.config.sft_config import RowOptions, SftTrainerConfig
from rollmesh.sft.sft_trainer import SftTrainer
from rollmesh.sft.training_rows import EpochOrder, SftRow, read_rows, rows_digest, token_batch
from rollmesh.text import Tokenizer
from rollmesh.trainer.learner.distributed import World
from rollmesh.trainer.learner.policy_learner import PolicyLearner

from ...kit.demonstration_rows import write_rows

MODEL = resolve_model("recipe:countdown")
STEPS, BATCH = 6, 5


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[SftRow]:
    file = write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", STEPS * BATCH, seed=4)
    return read_rows([file], Tokenizer(MODEL), RowOptions(), 1024)


def trainer_of(**fields: Any) -> SftTrainer:
    config = SftTrainerConfig(**{"learning_rate": 2e-3, "device": "cpu", **fields})
    learner = PolicyLearner.load(MODEL, config, dtype="float32", adapter=None, world=World(), longest=256)
    return SftTrainer(learner, config, STEPS, seed=0)


def plain_loss(model: Any, rows: list[SftRow]) -> torch.Tensor:
    """Mean over all target tokens of the batch, one row after the other."""
    total, count = torch.zeros(()), 0
    for row in rows:
        ids = torch.from_numpy(row.token_ids.astype("int64"))
        targets = ids.masked_fill(~torch.from_numpy(row.loss_mask), -100)
        logits = model(input_ids=ids[None]).logits[0, :-1].float()
        total = total + cross_entropy(logits, targets[1:], ignore_index=-100, reduction="sum")
        count += int(row.loss_mask.sum())
    return total / count


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear"])
def test_steps_equal_those_of_torch_and_the_schedule_of_transformers(rows: list[SftRow], schedule: str) -> None:
    trainer = trainer_of(
        lr_schedule=schedule, betas=(0.9, 0.999), weight_decay=0.1, max_grad_norm=0.3, tokens_per_microbatch=128
    )
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=2e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
    )
    rates = get_scheduler(schedule, optimizer, num_warmup_steps=0, num_training_steps=STEPS)
    microbatches = 0
    for start in range(0, STEPS * BATCH, BATCH):
        batch = rows[start : start + BATCH]
        done = trainer.train(batch)
        loss = plain_loss(model, batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        assert done.loss == pytest.approx(loss.item(), abs=1e-5)
        assert done.grad_norm == pytest.approx(norm.item(), rel=1e-3)
        assert done.learning_rate == pytest.approx(rates.get_last_lr()[0])
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
        microbatches = max(microbatches, done.microbatches)
    assert microbatches > 1, "the mean is over the batch, not over its parts"


def test_the_loss_of_held_out_rows_is_over_all_of_their_targets(rows: list[SftRow]) -> None:
    with torch.no_grad():
        expected = plain_loss(AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32), rows)
    assert trainer_of().evaluate(rows) == pytest.approx(expected.item(), abs=1e-5)


def test_rows_with_one_beginning_are_computed_once_with_the_same_loss(rows: list[SftRow]) -> None:
    alike = [rows[0]] * 3
    shared, alone = trainer_of(share_prefixes=True).train(alike), trainer_of(share_prefixes=False).train(alike)
    assert shared.loss == pytest.approx(alone.loss, abs=1e-5)
    assert shared.forward_tokens * 3 == alone.forward_tokens


def test_a_gradient_that_is_not_finite_changes_no_weight(rows: list[SftRow]) -> None:
    trainer = trainer_of()
    head = trainer.learner.model.causal_lm.get_input_embeddings().weight
    before = head.detach().clone()
    head.register_hook(lambda gradient: gradient * torch.nan)
    assert not trainer.train(rows[:2]).applied
    assert torch.equal(head.detach(), before)


def row(*ids: int, targets: tuple[int, ...]) -> SftRow:
    mask = np.zeros(len(ids), np.bool_)
    mask[list(targets)] = True
    return SftRow(token_ids=np.array(ids, np.int32), loss_mask=mask)


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_has_every_row_once_and_its_last_batch_the_rest(shuffle: bool) -> None:
    order = EpochOrder(10, 4, 7, shuffle)
    assert order.epoch_steps == 3
    epochs = [[order.rows(3 * epoch + step).tolist() for step in (1, 2, 3)] for epoch in range(2)]
    assert [[len(batch) for batch in epoch] for epoch in epochs] == [[4, 4, 2]] * 2
    first, second = ([row for batch in epoch for row in batch] for epoch in epochs)
    assert sorted(first) == sorted(second) == list(range(10))
    assert (first != second) is shuffle
    assert (first == list(range(10))) is not shuffle


def test_a_step_has_the_same_rows_whatever_was_asked_before_and_a_seed_changes_them() -> None:
    order = EpochOrder(64, 8, 1, True)
    forwards = [order.rows(step).tolist() for step in range(1, 25)]
    assert [EpochOrder(64, 8, 1, True).rows(step).tolist() for step in range(24, 0, -1)][::-1] == forwards
    assert EpochOrder(64, 8, 2, True).rows(1).tolist() != forwards[0]


def test_rows_are_concatenated_and_no_first_token_is_a_target() -> None:
    batch = token_batch([row(5, 6, 7, targets=(1, 2)), row(8, 9, targets=(0, 1))])
    assert batch.token_ids.tolist() == [5, 6, 7, 8, 9]
    assert batch.starts.tolist() == [0, 3, 5]
    assert batch.policy_mask.tolist() == [False, True, True, False, True]


def test_the_digest_of_rows_tells_tokens_targets_order_and_their_ends() -> None:
    rows = [row(1, 2, 3, targets=(2,)), row(4, 5, targets=(1,))]
    others = [
        [row(1, 2, 9, targets=(2,)), rows[1]],
        [row(1, 2, 3, targets=(1,)), rows[1]],
        rows[::-1],
        [row(1, 2, 3, 4, targets=(2,)), row(5, targets=())],
    ]
    assert rows_digest(rows) == rows_digest([row(1, 2, 3, targets=(2,)), row(4, 5, targets=(1,))])
    assert len({rows_digest(each) for each in [rows, *others]}) == 5
