"""Methods of the user's code and of the registry, bound with their options."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from rollmesh.algorithms.losses import ClipReason, LossInput, loss_options
from rollmesh.config.loss_methods import LOSSES, MaskConfig
from rollmesh.config.trainer import AlgorithmConfig, TrainerConfig
from rollmesh.errors import ConfigError, DataError
from rollmesh.trainer.learner.method_binding import bind_advantage, bind_loss, bind_masks, loss_recipe, step_recipe
from rollmesh.trainer.learner.train_batch import build_train_batch
from rollmesh.trainer.learner.train_step import apply_masks
from rollmesh.types import FinishReason

from ....kit.made_batches import batch_of, policy_segment, random_batch, trajectory

ROOT = Path(__file__).parents[4]

OWN = """
from dataclasses import replace

import torch

from rollmesh.algorithms.losses import ppo_clip

def plain(data):
    return data.rewards * 2

def missing(data):
    return data.rewards / 0 * 0

def huge(data):
    return data.rewards + 1e160

def short(data):
    return data.rewards[:-1]

def elsewhere(data):
    return data.rewards.to("meta")

def whole_numbers(data):
    return data.rewards.long()

def a_list(data):
    return data.rewards.tolist()

def two_inputs(data, more):
    return data.rewards

def number_loss(data, options):
    return data.logprobs.sum()

def nan_loss(data, options):
    result = ppo_clip(data, options)
    return replace(result, loss=result.loss.masked_fill(data.advantages == 0, float("nan")))

def short_loss(data, options):
    result = ppo_clip(data, options)
    return replace(result, weight=result.weight[:-1])

def loss_elsewhere(data, options):
    result = ppo_clip(data, options)
    return replace(result, loss=result.loss.to("meta"))

def odd_tokens(data, *, first=0):
    return (torch.arange(len(data.mask)) + first) % 2 == 1

def weights(data):
    return data.mask.double()

def short_mask(data):
    return data.mask[1:]

def mask_elsewhere(data):
    return data.mask.to("meta")

constant = 3
"""


@pytest.fixture(autouse=True)
def _own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_methods.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_methods", raising=False)


def test_the_advantage_of_the_examples_leaves_cut_answers_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    rng = np.random.default_rng(0)
    ends = (FinishReason.STOP, FinishReason.STOP, FinishReason.LENGTH)
    members = [
        trajectory(f"g0.{i}", [policy_segment(rng, 2)], reward, finish=end)
        for i, (reward, end) in enumerate(zip((1.0, 0.0, 0.0), ends, strict=True))
    ]
    own = AlgorithmConfig(advantage="own_advantage:whole_answers", advantage_options={"least": 2})
    got = build_train_batch(batch_of(members), {0: 0}, bind_advantage(own).compute).advantages
    assert got.tolist() == [0.5, -0.5, 0.0]
    strict = AlgorithmConfig(advantage="own_advantage:whole_answers", advantage_options={"least": 3})
    assert not build_train_batch(batch_of(members), {0: 0}, bind_advantage(strict).compute).advantages.any()


def test_the_advantage_of_the_examples_has_at_most_20_lines() -> None:
    lines = (ROOT / "examples" / "own_advantage.py").read_text().split('"""\n', 1)[1].strip().splitlines()
    assert len(lines) <= 20


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("missing", "not a finite number"),
        ("huge", "of at most 1e.09 in size"),
        ("short", "one per trajectory"),
        ("elsewhere", "on meta instead of cpu"),
        ("whole_numbers", "not a finite number"),
        ("a_list", "list instead of a tensor"),
    ],
)
def test_an_advantage_that_returns_something_else_is_refused(name: str, problem: str) -> None:
    advantage = bind_advantage(AlgorithmConfig(advantage=f"own_methods:{name}"))
    with pytest.raises(DataError, match=f"trainer.algorithm.advantage.*own_methods:{name}.*{problem}"):
        build_train_batch(random_batch(0), {0: 0}, advantage.compute)


@pytest.mark.parametrize(
    ("algorithm", "problem"),
    [
        (AlgorithmConfig(advantage="own_methods:two_inputs"), "cannot be called as f"),
        (AlgorithmConfig(advantage="own_methods:plain", advantage_options={"beta": 1}), "unexpected keyword.*beta"),
        (AlgorithmConfig(advantage="own_methods:constant"), "must be a plain function"),
        (AlgorithmConfig(advantage="own_methods:nothing"), "has no 'nothing'"),
        (AlgorithmConfig(advantage="no_such_module:plain"), "no module 'no_such_module'"),
    ],
)
def test_code_that_cannot_be_called_as_an_advantage_is_refused_at_startup(
    algorithm: AlgorithmConfig, problem: str
) -> None:
    with pytest.raises(ConfigError, match=f"trainer.algorithm.advantage: .*{problem}"):
        bind_advantage(algorithm)


def loss_input(advantages: list[float], mask: list[bool]) -> LossInput:
    """One sequence on policy."""
    column = torch.zeros(len(mask))
    return LossInput(
        logprobs=column,
        old_logprobs=column,
        behavior_logprobs=column,
        advantages=torch.tensor(advantages),
        mask=torch.tensor(mask),
        sequence_index=column.long(),
        sequence_count=1,
    )


def test_the_loss_of_the_examples_caps_the_ratio_to_the_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    algorithm = AlgorithmConfig(loss="own_loss:capped", loss_options={"cap": 1.5})
    data = LossInput(
        logprobs=torch.log(torch.tensor([0.5, 0.2])).requires_grad_(),
        old_logprobs=torch.zeros(2),
        behavior_logprobs=torch.log(torch.tensor([0.4, 0.1])),
        advantages=torch.tensor([2.0, -1.0]),
        mask=torch.tensor([True, True]),
        sequence_index=torch.zeros(2, dtype=torch.int64),
        sequence_count=1,
    )
    result = bind_loss(algorithm)(data, loss_options(LOSSES["ppo_clip"]))
    result.loss.sum().backward()
    # The ratios are 0.5 / 0.4 and 0.2 / 0.1; the gradient of -w A log pi to log pi is -w A.
    torch.testing.assert_close(data.logprobs.grad, torch.tensor([-1.25 * 2, 1.5]))
    assert result.clip.tolist() == [ClipReason.NONE, ClipReason.TRUNCATED]


def test_a_loss_that_is_no_number_is_refused_for_a_token_in_the_loss_only() -> None:
    loss, options = bind_loss(AlgorithmConfig(loss="own_methods:nan_loss")), loss_options(LOSSES["ppo_clip"])
    assert loss(loss_input([1.0, 0.0], [True, False]), options).loss.isnan().tolist() == [False, True]
    with pytest.raises(DataError, match="trainer.algorithm.loss=own_methods:nan_loss: .*not a finite number"):
        loss(loss_input([1.0, 0.0], [True, True]), options)
    with pytest.raises(DataError, match=r"trainer.algorithm.loss=own_methods:nan_loss: .*of at most 1e\+09 in size"):
        loss(loss_input([1e30, 1.0], [True, True]), options)
    diverged = loss_input([1.0, 0.0], [True, True])
    diverged.logprobs[1] = torch.nan
    assert loss(diverged, options).loss.isnan().tolist() == [False, True]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("short_loss", "returned as weight a tensor of shape .*: one per token"),
        ("loss_elsewhere", "returned as loss a tensor on meta instead of cpu"),
        ("number_loss", "returned Tensor instead of TokenLoss"),
    ],
)
def test_a_loss_that_does_not_fit_the_tokens_is_refused(name: str, problem: str) -> None:
    loss = bind_loss(AlgorithmConfig(loss=f"own_methods:{name}"))
    with pytest.raises(DataError, match=f"trainer.algorithm.loss=own_methods:{name}: {problem}"):
        loss(loss_input([1.0, 0.0], [True, True]), loss_options(LOSSES["ppo_clip"]))


def test_masks_of_the_users_code_take_tokens_in_order_and_each_token_once() -> None:
    algorithm = AlgorithmConfig(
        masks=(
            MaskConfig(name="own_methods:odd_tokens"),
            MaskConfig(name="opsm", options={"delta": 0.0}),
            MaskConfig(name="own_methods:odd_tokens", options={"first": 1}),
        )
    )
    flat = build_train_batch(random_batch(0), {0: 0}, bind_advantage(AlgorithmConfig()).compute)
    old = torch.from_numpy(flat.behavior_logprobs.astype(np.float64)) - 1.0
    masked = apply_masks(flat, bind_masks(algorithm), old, None, None)
    assert not masked.loss_mask.any() and set(masked.masked_by) == {"own", "opsm"}
    counts = sum(column.astype(int) for column in masked.masked_by.values())
    assert (counts == flat.loss_mask).all() and all(column.any() for column in masked.masked_by.values())


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("weights", "returned torch.float64 instead of torch.bool"),
        ("short_mask", r"of shape .*: one per token"),
        ("mask_elsewhere", "on meta instead of cpu"),
    ],
)
def test_a_mask_that_does_not_fit_the_tokens_is_refused(name: str, problem: str) -> None:
    flat = build_train_batch(random_batch(0), {0: 0}, bind_advantage(AlgorithmConfig()).compute)
    masks = bind_masks(AlgorithmConfig(masks=(MaskConfig(name=f"own_methods:{name}"),)))
    with pytest.raises(DataError, match=rf"trainer.algorithm.masks.0.*own_methods:{name}.*{problem}"):
        apply_masks(flat, masks, torch.from_numpy(flat.behavior_logprobs.astype(np.float64)), None, None)


def test_a_users_loss_has_the_defaults_of_ppo_clip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_losses.py").write_text("from rollmesh.algorithms.losses import ppo_clip as mine\n\n\nbound = 0.2\n")
    monkeypatch.syspath_prepend(tmp_path)
    algorithm = AlgorithmConfig(loss="my_losses:mine")
    recipe = step_recipe(TrainerConfig(algorithm=algorithm), max_token_staleness=None)
    own, registered = loss_recipe(recipe.algorithm), loss_recipe(AlgorithmConfig())
    assert (own.options, own.aggregation) == (registered.options, registered.aggregation)
    for target, problem in (("my_losses:bound", "must be a plain function"), ("my_losses:other", "has no 'other'")):
        with pytest.raises(ConfigError, match=f"trainer.algorithm.loss: .*{problem}"):
            loss_recipe(AlgorithmConfig(loss=target))


def test_a_recipe_records_the_defaults_of_every_method() -> None:
    algorithm = AlgorithmConfig(
        advantage="mc_grpo", loss="kimi", masks=(MaskConfig(name="icepop", options={"high": 2.0}),)
    )
    recorded = step_recipe(TrainerConfig(algorithm=algorithm), max_token_staleness=None).algorithm
    assert recorded.advantage_options == {"adv_clip": 5.0} and recorded.loss_options == {"tau": 0.1}
    assert recorded.masks[0].options == {"low": 0.5, "high": 2.0}
    assert AlgorithmConfig.model_validate_json(recorded.model_dump_json()) == recorded
