"""Methods of a run file with wrong options, or in combinations without an effect."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rollmesh.config import RunConfig
from rollmesh.config.trainer import AlgorithmConfig
from rollmesh.errors import ConfigError
from rollmesh.scheduling import Schedule


def run(algorithm: dict[str, Any], **sections: Any) -> RunConfig:
    values = {"name": "run", "folder": "run", "model": {"path": "model"}, "trainer": {"algorithm": algorithm}}
    return RunConfig.model_validate(values | sections)


@pytest.mark.parametrize(
    ("algorithm", "problem"),
    [
        (
            {"advantage": "mc_grpo", "advantage_options": {"clip": 1}},
            "mc_grpo has no such option; its options: adv_clip",
        ),
        (
            {"advantage": "pairs", "advantage_options": {"alpha": 0.5}},
            r"alpha belongs to grpo_lambda\); its options: kept",
        ),
        ({"advantage_options": {"kept": 0.5}}, r"grpo has no such option \(kept belongs to pairs\); its options: norm"),
        ({"advantage": "drpo"}, "advantage_options.longest_tokens of drpo: Field required"),
        ({"advantage": "pairs", "advantage_options": {"kept": 0}}, "advantage_options.kept=0 of pairs"),
        ({"advantage": "grpoo"}, "expected grpo, dr_grpo, .*, or module:function of your code"),
        ({"loss": "kimi", "loss_options": {"tau": -1}}, "loss_options.tau=-1 of kimi"),
        ({"loss_options": {"tau": 1}}, r"ppo_clip has no such option \(tau belongs to kimi\)"),
        ({"masks": ["ice"]}, "expected icepop, ratio, opsm, m2po, mastered, or module:function"),
        ({"masks": [{"name": "icepop", "options": {"delta": 1}}]}, r"delta belongs to opsm\); its options: low, high"),
        ({"masks": ["ratio"]}, "set at least one of token, sequence, geometric and veto"),
        ({"masks": [{"name": "ratio", "options": {"token": [2, 3]}}]}, "0 <= low <= 1 <= high"),
        ({"masks": ["icepop"]}, "masks.0=icepop with trainer.algorithm.old_logprobs=sampler would mask nothing"),
        ({"loss": "topr", "clip_high": 2}, "clip_high=2: trainer.algorithm.loss=topr has no bounds"),
        ({"loss": "minpro", "dual_clip": 3}, "dual_clip=3: trainer.algorithm.loss=minpro has no dual clip"),
    ],
)
def test_a_method_with_wrong_options_is_refused_with_its_field(algorithm: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        run(algorithm)


@pytest.mark.parametrize("source", ["sampler", "stage_end"])
def test_replay_without_a_trainer_side_source_is_refused(source: str) -> None:
    trainer = {"algorithm": {"old_logprobs": source}, "replay": {"share": 0.5}}
    with pytest.raises(
        ValidationError, match=f"trainer.replay with trainer.algorithm.old_logprobs={source}.*recompute"
    ):
        run({}, trainer=trainer)


def test_replay_needs_a_staleness_bound_above_zero() -> None:
    trainer = {"algorithm": {"old_logprobs": "recompute"}, "replay": {}}
    for schedule, remedy in (({"preset": "sync"}, "take another preset"), ({"max_staleness": 0}, "raise it")):
        with pytest.raises(ConfigError, match=f"max_staleness=0: every earlier group.*{remedy}"):
            Schedule.from_config(run({}, trainer=trainer, schedule=schedule))
    assert Schedule.from_config(run({}, trainer=trainer)).max_staleness > 0


@pytest.mark.parametrize("groups", [1, 4, 512])
def test_a_share_of_replay_that_rounds_to_no_group_is_refused_with_the_smallest_one(groups: int) -> None:
    def schedule(share: float) -> Schedule:
        trainer = {"algorithm": {"old_logprobs": "recompute"}, "replay": {"share": share}}
        return Schedule.from_config(run({}, trainer=trainer, schedule={"groups_per_batch": groups}))

    with pytest.raises(ConfigError, match="rounds to no group; set a share from") as caught:
        schedule(0.0005)
    named = re.search(r"a share from ([0-9.]+),", str(caught.value))
    assert named is not None
    smallest = float(named[1])
    with pytest.raises(ConfigError, match="rounds to no group"):
        schedule(smallest - 0.001 + 1e-9 if smallest > 0.001 else 0.0005)
    assert schedule(smallest).groups_per_batch == groups


def test_ewma_is_refused_where_no_ratio_is_left() -> None:
    with pytest.raises(
        ValidationError, match="old_logprobs=ewma with loss=topr and advantage=filtered_bc has no effect"
    ):
        run({"old_logprobs": "ewma", "loss": "topr", "advantage": "filtered_bc"})


DRPO = {
    "advantage": "drpo",
    "advantage_options": {"longest_tokens": 1024},
    "aggregation": "sequence_mean_token_mean",
}
TBA = {"advantage": "tba", "advantage_options": {"beta": 0.1}}


@pytest.mark.parametrize("algorithm", [DRPO, {"advantage": "grpo_lambda"}, {"advantage": "filtered_bc"}])
def test_an_advantage_of_right_answers_refuses_a_penalty_on_the_reward(algorithm: dict[str, Any]) -> None:
    assert run(algorithm).trainer.algorithm.advantage == algorithm["advantage"]
    problem = f"overlong_buffer_tokens=64 with trainer.algorithm.advantage={algorithm['advantage']}.*set .*=0"
    with pytest.raises(ValidationError, match=problem):
        run(algorithm, reward={"overlong_buffer_tokens": 64})


@pytest.mark.parametrize("algorithm", [TBA, {"advantage": "grpo_lambda"}, {"advantage": "filtered_bc"}])
def test_groups_of_equal_rewards_are_not_dropped_from_an_advantage_that_trains_on_them(
    algorithm: dict[str, Any],
) -> None:
    assert not run(algorithm).schedule.filter_zero_variance
    with pytest.raises(ValidationError, match=f"filter_zero_variance=true .*={algorithm['advantage']} .*set false"):
        run(algorithm, schedule={"filter_zero_variance": True})
    assert run(DRPO, schedule={"filter_zero_variance": True}).schedule.filter_zero_variance


@pytest.mark.parametrize(
    ("algorithm", "problem"),
    [
        (DRPO | {"aggregation": None}, "=null, which is token_mean with loss=ppo_clip.*=sequence_mean_token_mean"),
        (DRPO | {"aggregation": "token_mean"}, "=token_mean: .*=drpo .*set aggregation=sequence_mean_token_mean"),
        (TBA | {"loss": "gspo"}, "=null, which is sequence_mean_token_mean with loss=gspo.*aggregation=token_mean"),
    ],
)
def test_an_advantage_refuses_an_aggregation_with_which_it_is_another_method(
    algorithm: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValidationError, match=f"trainer.algorithm.aggregation{problem}"):
        run(algorithm)


def test_the_loss_may_have_the_aggregation_that_the_advantage_requires() -> None:
    assert run(DRPO | {"aggregation": None, "loss": "gspo"}).trainer.algorithm.aggregation is None


@pytest.mark.parametrize("source", ["recompute", "current"])
def test_kimi_refuses_old_logprobs_that_are_those_of_the_policy_itself(source: str) -> None:
    algorithm = {"loss": "kimi", "old_logprobs": source}
    with pytest.raises(ValidationError, match=f"old_logprobs={source} .*leaves out the squared term.*use old_logprobs"):
        run(algorithm)
    split = run({}, trainer={"minibatches": 2, "algorithm": algorithm}, schedule={"groups_per_batch": 4})
    assert split.trainer.algorithm.old_logprobs == source
    assert run({"loss": "kimi", "old_logprobs": "loglinear"}).trainer.minibatches == 1


@pytest.mark.parametrize("advantage", ["filtered_bc", "reinforce_pp", "my_code:mine"])
def test_an_advantage_that_compares_no_group_allows_groups_of_one(advantage: str) -> None:
    config = run({"advantage": advantage}, schedule={"group_size": 1})
    assert config.schedule.group_size == 1


@pytest.mark.parametrize("value", [float("inf"), float("nan"), (1, 2), {1: "one"}, {1, 2}, [{"deep": (1,)}]])
def test_options_of_own_code_that_a_batch_file_would_change_are_refused(value: Any) -> None:
    kept = {"scale": 0.5, "names": ["a", None], "deep": {"flag": True}}
    for field, algorithm in (
        ("advantage_options", {"advantage": "my_code:mine", "advantage_options": kept | {"x": value}}),
        ("loss_options", {"loss": "my_code:mine", "loss_options": kept | {"x": value}}),
        ("options", {"masks": [{"name": "my_code:mine", "options": kept | {"x": value}}]}),
    ):
        with pytest.raises(ValidationError, match=rf"{field}\.x=.*: expected finite numbers"):
            run(algorithm)
    assert run({"advantage": "my_code:mine", "advantage_options": kept}).trainer.algorithm.advantage_options == kept


def test_a_mask_may_be_a_name_and_options_of_own_code_are_left_alone(tmp_path: Path) -> None:
    algorithm = AlgorithmConfig.model_validate(
        {"masks": ["mastered", {"name": "my_code:keep", "options": {"any": 1}}], "advantage": "my_code:mine"}
    )
    filled = algorithm.filled()
    assert [mask.options for mask in filled.masks] == [{"entropy": 0.2, "probability": 0.99}, {"any": 1}]
    assert filled.advantage_options == {}
