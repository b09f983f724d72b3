"""Methods of a run file with wrong options, and combinations of settings that cannot work or have no effect."""

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


DRPO = {"advantage": "drpo", "advantage_options": {"longest_tokens": 1024}, "aggregation": "sequence_mean_token_mean"}
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


def planned(curriculum: dict[str, Any], **sections: Any) -> RunConfig:
    return run({}, curriculum=curriculum, **sections)


def sampled(sampler: str, data: dict[str, Any], options: dict[str, Any] | None = None, **schedule: Any) -> RunConfig:
    curriculum = {"sampler": sampler, "sampler_options": options or {}}
    return planned(curriculum, data=data, schedule=schedule)


@pytest.mark.parametrize(
    ("curriculum", "problem"),
    [
        ({"planner": "dar"}, "planner=dar: expected single, dars, quorum, spare, or module:function"),
        (
            {"planner": "dars", "planner_options": {"share": 0.5}},
            r"dars has no such option \(share belongs to quorum\)",
        ),
        ({"planner_options": {"share": 0.5}}, "single has no such option .*its options: none"),
        ({"planner": "dars", "planner_options": {"rule": "ht"}}, "planner_options.rule='ht' of dars"),
        ({"planner": "quorum", "planner_options": {"share": 0}}, "planner_options.share=0 of quorum"),
        ({"planner": "spare", "planner_options": {"extra": 0}}, "factor=1 and extra=0 launch nothing more; raise one"),
        ({"most_members": 0}, "most_members"),
        ({"group_shaper": "dap"}, "group_shaper_options.longest_tokens of dap: Field required"),
        (
            {"group_shaper": "dap", "group_shaper_options": {"longest_tokens": 512}},
            "buffer_tokens=2048 is above longest_tokens=512; lower it",
        ),
        (
            {"group_shaper": "dot", "group_shaper_options": {"gamma": 1}},
            r"dot has no such option \(gamma belongs to dap",
        ),
        ({"group_shaper": "module:function:x"}, "group_shaper=module:function:x: expected none, dap, dot"),
        ({"token_budget": "cosine"}, "token_budget_options.shortest of cosine: Field required"),
        (
            {"token_budget": "stair", "token_budget_options": {"shortest": 9, "longest": 8}},
            "shortest=9 is above longest=8; swap them",
        ),
        ({"turn_budget": "steps", "turn_budget_options": {"stages": []}}, "the first of them 0"),
        ({"turn_budget": "steps", "turn_budget_options": {"stages": [[1, 4]]}}, "the first of them 0"),
        ({"turn_budget": "steps", "turn_budget_options": {"stages": [[0, 4], [0, 5]]}}, "with rising train steps"),
        ({"turn_budget": "steps", "turn_budget_options": {"stages": [[0, 0]]}}, "budgets of at least 1"),
        ({"token_budget_options": {"period": 4}}, r"constant has no such option \(period belongs to cosine"),
    ],
)
def test_a_curriculum_with_wrong_options_is_refused_with_its_field(curriculum: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        planned(curriculum)


DARS = {"planner": "dars"}
DOT = {"group_shaper": "dot"}
MEAN = {"algorithm": {"advantage": "dr_grpo"}}
LARGE = {"group_size": 32}
COSINE = {"token_budget": "cosine", "token_budget_options": {"shortest": 8, "longest": 600}}
DAP = {"group_shaper": "dap", "group_shaper_options": {"longest_tokens": 512, "buffer_tokens": 64}}
TURNS = {"turn_budget": "steps", "turn_budget_options": {"stages": [[0, 9]]}}
DRPO_TRAINER = {"algorithm": DRPO | {"advantage_options": {"longest_tokens": 512}}}


@pytest.mark.parametrize(
    ("curriculum", "sections", "problem"),
    [
        (
            DARS,
            {},
            "advantage=grpo with curriculum.planner=dars: .*set .*dr_grpo, or grpo with .*norm=none or group_std",
        ),
        (DARS, {"trainer": {"algorithm": {"advantage": "pairs"}}}, "advantage=pairs with curriculum.planner=dars"),
        ({"planner": "own:Planner"}, {}, "advantage=grpo with curriculum.planner=own:Planner"),
        (
            DARS,
            {
                "trainer": {"algorithm": {"advantage": "reinforce_pp"}},
                "schedule": {"harvest": "trajectory"},
                "evaluation": {"before_and_after": False},
            },
            "planner=dars with schedule.harvest=trajectory .*set schedule.harvest=group or curriculum.planner=single",
        ),
        (
            DARS,
            {"trainer": MEAN, "schedule": {"spare_members": 2}},
            "schedule.spare_members=2 with curriculum.planner=dars: .*set schedule.spare_members=0",
        ),
        (
            {"planner": "quorum"},
            {"rollout": {"program": "agent"}},
            "planner=quorum with rollout.program=agent: .*set curriculum.planner=single",
        ),
        ({"most_members": 4}, {}, "most_members=4 with curriculum.planner=single would have no effect"),
        (
            DARS | {"most_members": 16},
            {"trainer": MEAN},
            "most_members=16 with curriculum.planner=dars, which launches up to 32 .*set curriculum.most_members=32",
        ),
        (
            {"planner": "own:Planner", "most_members": 4},
            {"trainer": MEAN},
            "most_members=4 with curriculum.planner=own:Planner, which launches up to 8",
        ),
        (
            DARS | {"planner_options": {"most_members": 8}},
            {"trainer": MEAN},
            "planner_options.most_members=8 with schedule.group_size=8 leaves no room for a second round",
        ),
        (
            {"planner": "quorum", "planner_options": {"share": 0.1}},
            {},
            "planner_options.share=0.1 with schedule.group_size=8 completes a group with one scored member",
        ),
        (DARS | DOT, {"trainer": MEAN}, "alpha=3 with groups of at most 8"),
        ({"planner": "spare", "planner_options": {"factor": 600}}, {}, "up to 48.. members, above 2048; set"),
        (DOT, {}, "alpha=3 with groups of at most 8: .*2.475 or more .*set alpha=2.23 or less"),
        (
            DOT,
            {"schedule": LARGE, "trainer": DRPO_TRAINER},
            "group_shaper=dot with trainer.algorithm.advantage=drpo: .*set curriculum.group_shaper=none",
        ),
        (
            {"group_shaper": "own:shaper"},
            {"trainer": {"algorithm": {"advantage": "filtered_bc"}}},
            "group_shaper=own:shaper with trainer.algorithm.advantage=filtered_bc",
        ),
        (
            DOT,
            {"trainer": {"algorithm": {"advantage": "reinforce_pp"}}, "schedule": {"harvest": "trajectory"} | LARGE},
            "group_shaper=dot with schedule.harvest=trajectory .*set schedule.harvest=group",
        ),
        (
            DOT,
            {"schedule": {"preset": "copris_paper"} | LARGE, "trainer": {"algorithm": {"old_logprobs": "stage_end"}}},
            "old_logprobs=stage_end with curriculum.group_shaper=dot: .*set trainer.algorithm.old_logprobs=sampler",
        ),
        (DAP, {"rollout": {"max_new_tokens": 600}}, "longest_tokens=512 is not rollout.max_new_tokens=600"),
        (DAP, {"reward": {"overlong_buffer_tokens": 8}}, "overlong_buffer_tokens=8 .*twice; set .*=0"),
        (
            DAP | {"token_budget": "steps", "token_budget_options": {"stages": [[0, 64]]}},
            {},
            "token_budget=steps with curriculum.group_shaper=dap: .*set curriculum.token_budget=constant",
        ),
        (COSINE, {}, "token_budget_options.longest: a budget of 600 is above rollout.max_new_tokens=512; lower it"),
        (COSINE, {"rollout": {"program": "agent"}}, "token_budget=cosine with rollout.program=agent"),
        (TURNS, {}, "turn_budget=steps with rollout.program=single_turn, which has no turns; set"),
        (TURNS, {"rollout": {"program": "environment"}}, "stages: a budget of 9 is above rollout.max_turns=8"),
    ],
)
def test_a_curriculum_that_cannot_work_names_field_value_and_remedy(
    curriculum: dict[str, Any], sections: dict[str, Any], problem: str
) -> None:
    config = planned(curriculum, **sections)
    with pytest.raises(ConfigError, match=problem):
        Schedule.from_config(config)


@pytest.mark.parametrize(
    ("curriculum", "sections"),
    [
        (DARS, {"trainer": MEAN}),
        (DARS, {"trainer": {"algorithm": {"advantage_options": {"norm": "group_std"}}}}),
        (DARS, {"trainer": {"algorithm": {"advantage_options": {"norm": "none"}}}}),
        (DARS | {"most_members": 32}, {"trainer": MEAN}),
        (DARS | DOT | {"group_shaper_options": {"alpha": 2.23}}, {"trainer": MEAN}),
        ({"planner": "quorum"}, {}),
        ({"planner": "spare"}, {"trainer": {"algorithm": {"advantage": "mc_grpo"}}}),
        (DOT, {"schedule": LARGE}),
        (DOT | {"group_shaper_options": {"alpha": 2.23}}, {}),
        (DAP, {}),
        (TURNS, {"rollout": {"program": "environment", "max_turns": 9}}),
        (COSINE, {"rollout": {"max_new_tokens": 600}}),
    ],
)
def test_a_curriculum_that_can_work_is_accepted(curriculum: dict[str, Any], sections: dict[str, Any]) -> None:
    assert Schedule.from_config(planned(curriculum, **sections)).train_steps == 40


MIXTURE = {
    "source": {
        "type": "mixture",
        "parts": [
            {"name": "short", "weight": 0.5, "source": {"type": "countdown", "max_numbers": 5}},
            {"name": "long", "weight": 0.5, "source": {"type": "countdown", "min_numbers": 7}},
        ],
    }
}
TABLE = {"source": {"type": "jsonl", "path": "rows.jsonl"}}
PUZZLES = {"source": {"type": "countdown", "puzzles": 64}}


def test_every_sampler_has_data_on_which_it_works() -> None:
    assert sampled("domain_mix", MIXTURE).curriculum.sampler == "domain_mix"
    shares = {"targets": {"a": 0.25, "b": 0.75}}
    assert sampled("domain_mix", TABLE | {"domain_field": "topic"}, shares).curriculum.sampler_options == shares
    for sampler in ("difficulty", "frontier", "band", "unsolved"):
        assert sampled(sampler, PUZZLES).curriculum.sampler == sampler


@pytest.mark.parametrize(
    ("sampler", "data", "options", "problem"),
    [
        ("band", {}, {}, "countdown gives a new prompt at every draw.*set data.source.puzzles"),
        ("domain_mix", TABLE, {}, "domain_mix needs domains: set data.domain_field, or use data.source.type=mixture"),
        ("domain_mix", TABLE | {"domain_field": "topic"}, {}, "targets: name the share of every domain"),
        (
            "domain_mix",
            MIXTURE,
            {"targets": {"short": 0.5, "lang": 0.5}},
            "targets.lang: data.source has no such part; its parts are short, long",
        ),
        ("domain_mix", MIXTURE, {"targets": {"short": 0.5, "long": 0.6}}, "the shares sum to 1.1; they must sum to 1"),
        ("domain_mix", MIXTURE, {"targets": {"short": 0.0, "long": 1.0}}, "every share must be above 0"),
    ],
)
def test_a_sampler_that_its_data_cannot_serve_is_refused(
    sampler: str, data: dict[str, Any], options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValidationError, match=problem):
        sampled(sampler, data, options)


@pytest.mark.parametrize("schedule", [{"preset": "sorted"}, {"preset": "sync", "harvest": "trajectory"}])
def test_a_sampler_is_refused_where_every_trajectory_is_a_group(schedule: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match="curriculum.sampler=band: with schedule.harvest=trajectory .*order"):
        sampled("band", PUZZLES, **schedule)
