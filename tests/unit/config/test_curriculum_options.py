"""Planners, group shapers and budgets with wrong options, or in combinations that cannot work."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from rollmesh.config import RunConfig
from rollmesh.errors import ConfigError
from rollmesh.scheduling import Schedule


def run(curriculum: dict[str, Any], **sections: Any) -> RunConfig:
    values = {"name": "run", "folder": "run", "model": {"path": "model"}, "curriculum": curriculum}
    return RunConfig.model_validate(values | sections)


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
        run(curriculum)


DARS = {"planner": "dars"}
DOT = {"group_shaper": "dot"}
MEAN = {"algorithm": {"advantage": "dr_grpo"}}
LARGE = {"group_size": 32}
COSINE = {"token_budget": "cosine", "token_budget_options": {"shortest": 8, "longest": 600}}
DAP = {"group_shaper": "dap", "group_shaper_options": {"longest_tokens": 512, "buffer_tokens": 64}}
TURNS = {"turn_budget": "steps", "turn_budget_options": {"stages": [[0, 9]]}}
DRPO = {
    "algorithm": {
        "advantage": "drpo",
        "advantage_options": {"longest_tokens": 512},
        "aggregation": "sequence_mean_token_mean",
    }
}


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
            {"schedule": LARGE, "trainer": DRPO},
            "group_shaper=dot with trainer.algorithm.advantage=drpo: .*set curriculum.group_shaper=none",
        ),
        (
            {"group_shaper": "own:shaper"},
            {"trainer": {"algorithm": {"advantage": "filtered_bc"}}},
            "group_shaper=own:shaper with trainer.algorithm.advantage=filtered_bc",
        ),
        (
            DOT,
            {
                "trainer": {"algorithm": {"advantage": "reinforce_pp"}},
                "schedule": {"harvest": "trajectory"} | LARGE,
            },
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
    config = run(curriculum, **sections)
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
    assert Schedule.from_config(run(curriculum, **sections)).train_steps == 40
