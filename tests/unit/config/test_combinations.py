"""Methods of a run file with wrong options, and combinations of settings that cannot work or have no effect."""

import re
from typing import Any

import pytest
from pydantic import ValidationError

from rollmesh.config.trainer import AlgorithmConfig
from rollmesh.errors import ConfigError
from rollmesh.scheduling import Schedule

from ...kit.run_files import run_config


def of(section: str, fields: str) -> str:
    """Fields of a section by their whole names; those of other sections have them already."""
    sections = ("trainer", "curriculum", "schedule", "rollout", "reward", "evaluation", "generator", "data")
    return " ".join(f if f.split(".")[0] in sections else f"{section}.{f}" for f in fields.split())


def algorithm(fields: str) -> str:
    return of("trainer.algorithm", fields)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ("advantage=mc_grpo advantage_options.clip=1", "mc_grpo has no such option; its options: adv_clip"),
        ("advantage=pairs advantage_options.alpha=0.5", r"alpha belongs to grpo_lambda\); its options: kept"),
        ("advantage=drpo", "advantage_options.longest_tokens of drpo: Field required"),
        ("advantage=grpoo", "expected grpo, dr_grpo, .*, or module:function of your code"),
        ("loss=kimi loss_options.tau=-1", "loss_options.tau=-1 of kimi"),
        ("masks=[ice]", "expected icepop, ratio, opsm, m2po, mastered, or module:function"),
        ('masks=[{"name":"icepop","options":{"delta":1}}]', r"delta belongs to opsm\); its options: low, high"),
        ("masks=[ratio]", "set at least one of token, sequence, geometric and veto"),
        ('masks=[{"name":"ratio","options":{"token":[2,3]}}]', "0 <= low <= 1 <= high"),
        ("masks=[icepop]", "masks.0=icepop with trainer.algorithm.old_logprobs=sampler would mask nothing"),
        ("loss=topr clip_high=2", "clip_high=2: trainer.algorithm.loss=topr has no bounds"),
        ("loss=minpro dual_clip=3", "dual_clip=3: trainer.algorithm.loss=minpro has no dual clip"),
        ("loss=topr old_logprobs=ewma advantage=filtered_bc", "old_logprobs=ewma with loss=topr and .* has no effect"),
        *(
            (f"old_logprobs={source} trainer.replay.share=0.5", f"trainer.replay with .*={source}: .*recompute")
            for source in ("sampler", "stage_end")
        ),
    ],
)
def test_a_method_with_wrong_options_is_refused_with_its_field(fields: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        run_config(algorithm(fields))


REPLAY = "trainer.algorithm.old_logprobs=recompute"


def test_replay_needs_a_staleness_bound_above_zero() -> None:
    for schedule, remedy in (("preset=sync", "take another preset"), ("max_staleness=0", "raise it")):
        with pytest.raises(ConfigError, match=f"max_staleness=0: every earlier group.*{remedy}"):
            Schedule.from_config(run_config(f"{REPLAY} trainer.replay={{}} schedule.{schedule}"))
    assert Schedule.from_config(run_config(f"{REPLAY} trainer.replay={{}}")).max_staleness > 0


@pytest.mark.parametrize("groups", [1, 4, 512])
def test_a_share_of_replay_that_rounds_to_no_group_is_refused_with_the_smallest_one(groups: int) -> None:
    def schedule(share: float) -> Schedule:
        fields = f"{REPLAY} trainer.replay.share={share} schedule.groups_per_batch={groups}"
        return Schedule.from_config(run_config(fields))

    with pytest.raises(ConfigError, match="rounds to no group; set a share from") as caught:
        schedule(0.0005)
    named = re.search(r"a share from ([0-9.]+),", str(caught.value))
    assert named is not None
    smallest = float(named[1])
    with pytest.raises(ConfigError, match="rounds to no group"):
        schedule(smallest - 0.001 + 1e-9 if smallest > 0.001 else 0.0005)
    assert schedule(smallest).groups_per_batch == groups


DRPO = "advantage=drpo advantage_options.longest_tokens=512"
WHOLE_DRPO = f"{DRPO} aggregation=sequence_mean_token_mean"
TBA = "advantage=tba advantage_options.beta=0.1"
EQUAL = "schedule.filter_zero_variance=true"
PENALTY = "reward.overlong_buffer_tokens=64"


@pytest.mark.parametrize(
    ("works", "refused", "problem"),
    [
        *(
            (fields, PENALTY, f"overlong_buffer_tokens=64 with trainer.algorithm.advantage={name}.*set .*=0")
            for name, fields in (
                *(("drpo", WHOLE_DRPO), ("grpo_lambda", "advantage=grpo_lambda")),
                ("filtered_bc", "advantage=filtered_bc"),
            )
        ),
        *(
            (fields, EQUAL, f"filter_zero_variance=true .*={name} .*set false")
            for name, fields in (
                *(("tba", TBA), ("grpo_lambda", "advantage=grpo_lambda")),
                ("filtered_bc", "advantage=filtered_bc"),
            )
        ),
        *(
            (f"credit={credit} rollout.program=agent", refused, f"credit={credit} with .*{problem}")
            for credit, refused, problem in (
                ("turn", "advantage=mc_grpo", "advantage=mc_grpo, which reads more .*set advantage=grpo, dr_grpo, "),
                ("shared", "advantage=filtered_bc", "=filtered_bc, .* rloo or reinforce_pp, or credit=trajectory"),
                ("turn", "rollout.program=single_turn", "single_turn, whose trajectories have one turn"),
                (
                    "shared",
                    "rollout.program=environment",
                    "only sessions of agents share a reward; set rollout.program",
                ),
            )
        ),
        ("credit=turn rollout.program=environment", EQUAL, "=true with .*credit=turn .*whose turns differ; set false"),
        (WHOLE_DRPO, "aggregation=token_mean", "=token_mean: .*=drpo .*set aggregation=sequence_mean_token_mean"),
        (TBA, "loss=gspo", "=null, which is sequence_mean_token_mean with loss=gspo.*aggregation=token_mean"),
        *(
            (
                f"loss=kimi old_logprobs={source} trainer.minibatches=2 schedule.groups_per_batch=4",
                "trainer.minibatches=1",
                f"old_logprobs={source} .*leaves out the squared term.*use old_logprobs",
            )
            for source in ("recompute", "current")
        ),
    ],
)
def test_a_setting_with_which_a_method_is_another_one_or_has_no_effect_is_refused(
    works: str, refused: str, problem: str
) -> None:
    run_config(algorithm(works))
    with pytest.raises(ConfigError, match=problem):
        run_config(algorithm(f"{works} {refused}"))


def test_what_a_method_does_not_exclude_is_accepted() -> None:
    run_config(algorithm(f"{WHOLE_DRPO} {EQUAL}"))
    run_config(algorithm("loss=kimi old_logprobs=loglinear"))
    for advantage in ("filtered_bc", "reinforce_pp", "my_code:mine"):
        run_config(algorithm(f"advantage={advantage} schedule.group_size=1"))


@pytest.mark.parametrize("value", [float("inf"), float("nan"), (1, 2), {1: "one"}, {1, 2}, [{"deep": (1,)}]])
def test_options_of_own_code_that_a_batch_file_would_change_are_refused(value: Any) -> None:
    kept = {"scale": 0.5, "names": ["a", None], "deep": {"flag": True}}
    for field, section in (
        ("advantage_options", {"advantage": "my_code:mine", "advantage_options": kept | {"x": value}}),
        ("loss_options", {"loss": "my_code:mine", "loss_options": kept | {"x": value}}),
        ("options", {"masks": [{"name": "my_code:mine", "options": kept | {"x": value}}]}),
    ):
        with pytest.raises(ValidationError, match=rf"{field}\.x=.*: expected finite numbers"):
            AlgorithmConfig.model_validate(section)
    own = AlgorithmConfig.model_validate({"advantage": "my_code:mine", "advantage_options": kept})
    assert own.advantage_options == kept


def test_a_mask_may_be_a_name_and_options_of_own_code_are_left_alone() -> None:
    filled = AlgorithmConfig.model_validate(
        {"masks": ["mastered", {"name": "my_code:keep", "options": {"any": 1}}], "advantage": "my_code:mine"}
    ).filled()
    assert [mask.options for mask in filled.masks] == [{"entropy": 0.2, "probability": 0.99}, {"any": 1}]
    assert filled.advantage_options == {}


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ("planner=dar", "planner=dar: expected single, dars, quorum, spare, or module:function"),
        ("planner=dars planner_options.share=0.5", r"dars has no such option \(share belongs to quorum\)"),
        ("planner=dars planner_options.rule=ht", "planner_options.rule='ht' of dars"),
        ("planner=spare planner_options.extra=0", "factor=1 and extra=0 launch nothing more; raise one"),
        ("group_shaper=dap", "group_shaper_options.longest_tokens of dap: Field required"),
        ("group_shaper=dap group_shaper_options.longest_tokens=512", "=2048 is above longest_tokens=512; lower it"),
        ("group_shaper=module:function:x", "group_shaper=module:function:x: expected none, dap, dot"),
        (
            "token_budget=stair token_budget_options.shortest=9 token_budget_options.longest=8",
            "shortest=9 is above longest=8; swap them",
        ),
        ("turn_budget=steps turn_budget_options.stages=[[1,4]]", "the first of them 0"),
        ("turn_budget=steps turn_budget_options.stages=[[0,4],[0,5]]", "with rising train steps"),
        ("turn_budget=steps turn_budget_options.stages=[[0,0]]", "budgets of at least 1"),
    ],
)
def test_a_curriculum_with_wrong_options_is_refused_with_its_field(fields: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        run_config(of("curriculum", fields))


DARS, DOT = "planner=dars", "group_shaper=dot"
MEAN = "trainer.algorithm.advantage=dr_grpo"
PUZZLES = "data.source.type=countdown data.source.puzzles=64"
BATCH = "trainer.algorithm.advantage=reinforce_pp schedule.harvest=trajectory"
LARGE = "schedule.group_size=32"
COSINE = "token_budget=cosine token_budget_options.shortest=8 token_budget_options.longest=600"
DAP = "group_shaper=dap group_shaper_options.longest_tokens=512 group_shaper_options.buffer_tokens=64"
TURNS = "turn_budget=steps turn_budget_options.stages=[[0,9]]"


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        (DARS, "advantage=grpo with curriculum.planner=dars: .*set .*dr_grpo, or grpo with .*norm=none or group_std"),
        (f"{DARS} trainer.algorithm.advantage=pairs", "advantage=pairs with curriculum.planner=dars"),
        ("planner=own:Planner", "advantage=grpo with curriculum.planner=own:Planner"),
        (
            f"planner=own:Planner most_members=4 {MEAN}",
            "=4 with curriculum.planner=own:Planner, which launches up to 8",
        ),
        (
            f"{DARS} {BATCH} evaluation.before_and_after=false",
            "planner=dars with schedule.harvest=trajectory .*set schedule.harvest=group or curriculum.planner=single",
        ),
        (
            f"{DARS} {MEAN} schedule.spare_members=2",
            "schedule.spare_members=2 with curriculum.planner=dars: .*set schedule.spare_members=0",
        ),
        (
            "planner=quorum rollout.program=agent",
            "planner=quorum with rollout.program=agent: .*set curriculum.planner=single",
        ),
        ("most_members=4", "most_members=4 with curriculum.planner=single would have no effect"),
        (
            f"{DARS} most_members=16 {MEAN}",
            "most_members=16 with curriculum.planner=dars, which launches up to 32 .*set curriculum.most_members=32",
        ),
        (
            f"{DARS} planner_options.most_members=8 {MEAN}",
            "planner_options.most_members=8 with schedule.group_size=8 leaves no room for a second round",
        ),
        (
            "planner=quorum planner_options.share=0.1",
            "planner_options.share=0.1 with schedule.group_size=8 completes a group with one scored member",
        ),
        (f"{DARS} {DOT} {MEAN}", "alpha=3 with groups of at most 8"),
        ("planner=spare planner_options.factor=600", "up to 48.. members, above 2048; set"),
        (DOT, "alpha=3 with groups of at most 8: .*2.475 or more .*set alpha=2.23 or less"),
        (
            f"{DOT} {LARGE} {algorithm(WHOLE_DRPO)}",
            "group_shaper=dot with trainer.algorithm.advantage=drpo: .*set curriculum.group_shaper=none",
        ),
        (f"{DOT} {BATCH} {LARGE}", "group_shaper=dot with schedule.harvest=trajectory .*set schedule.harvest=group"),
        (
            f"{DOT} {LARGE} schedule.preset=copris_paper trainer.algorithm.old_logprobs=stage_end",
            "old_logprobs=stage_end with curriculum.group_shaper=dot: .*set trainer.algorithm.old_logprobs=sampler",
        ),
        (f"{DAP} rollout.max_new_tokens=600", "longest_tokens=512 is not rollout.max_new_tokens=600"),
        (f"{DAP} reward.overlong_buffer_tokens=8", "overlong_buffer_tokens=8 .*twice; set .*=0"),
        (
            f"{DAP} token_budget=steps token_budget_options.stages=[[0,64]]",
            "token_budget=steps with curriculum.group_shaper=dap: .*set curriculum.token_budget=constant",
        ),
        (COSINE, "token_budget_options.longest: a budget of 600 is above rollout.max_new_tokens=512; lower it"),
        (f"{COSINE} rollout.program=agent", "token_budget=cosine with rollout.program=agent"),
        (TURNS, "turn_budget=steps with rollout.program=single_turn, which has no turns; set"),
        (f"{TURNS} rollout.program=environment", "stages: a budget of 9 is above rollout.max_turns=8"),
        *(
            (f"sampler=band {PUZZLES} {MEAN} {schedule}", "sampler=band with schedule.harvest=trajectory .*=order")
            for schedule in ("schedule.preset=sorted", "schedule.preset=sync schedule.harvest=trajectory")
        ),
    ],
)
def test_a_curriculum_that_cannot_work_names_field_value_and_remedy(fields: str, problem: str) -> None:
    config = run_config(of("curriculum", fields))
    with pytest.raises(ConfigError, match=problem):
        Schedule.from_config(config)


@pytest.mark.parametrize(
    "fields",
    [
        f"{DARS} {MEAN}",
        f"{DARS} trainer.algorithm.advantage_options.norm=group_std",
        f"{DARS} trainer.algorithm.advantage_options.norm=none",
        f"{DARS} most_members=32 {MEAN}",
        f"{DARS} {DOT} group_shaper_options.alpha=2.23 {MEAN}",
        "planner=quorum",
        "planner=spare trainer.algorithm.advantage=mc_grpo",
        f"{DOT} {LARGE}",
        f"{DOT} group_shaper_options.alpha=2.23",
        DAP,
        f"{TURNS} rollout.program=environment rollout.max_turns=9",
        f"{COSINE} rollout.max_new_tokens=600",
    ],
)
def test_a_curriculum_that_can_work_is_accepted(fields: str) -> None:
    assert Schedule.from_config(run_config(of("curriculum", fields))).train_steps == 40


PARTS = (
    'data.source={"type":"mixture","parts":['
    '{"name":"short","weight":0.5,"source":{"type":"countdown","max_numbers":5}},'
    '{"name":"long","weight":0.5,"source":{"type":"countdown","min_numbers":7}}]}'
)
TABLE = 'data.source={"type":"jsonl","path":"rows.jsonl"}'
MIX = "sampler=domain_mix sampler_options.targets"


@pytest.mark.parametrize(
    "fields",
    [
        f"sampler=domain_mix {PARTS}",
        f'{MIX}={{"a":0.25,"b":0.75}} {TABLE} data.domain_field=topic',
        *(f"sampler={sampler} {PUZZLES}" for sampler in ("difficulty", "frontier", "band", "unsolved")),
    ],
)
def test_every_sampler_has_data_on_which_it_works(fields: str) -> None:
    config = run_config(of("curriculum", f"{fields} schedule.preset=sorted schedule.harvest=group"))
    assert Schedule.from_config(config).prompt_repeats == 1
    assert config.curriculum.sampler in fields


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ("sampler=band", "countdown gives a new prompt at every draw.*set data.source.puzzles"),
        (f"sampler=domain_mix {TABLE}", "needs domains: set data.domain_field, or use data.source.type=mixture"),
        (f"sampler=domain_mix {TABLE} data.domain_field=topic", "targets: name the share of every domain"),
        (
            f'{MIX}={{"short":0.5,"lang":0.5}} {PARTS}',
            "targets.lang: data.source has no such part; its parts are short, long",
        ),
        (f'{MIX}={{"short":0.5,"long":0.6}} {PARTS}', "the shares sum to 1.1; they must sum to 1"),
        (f'{MIX}={{"short":0.0,"long":1.0}} {PARTS}', "every share must be above 0"),
    ],
)
def test_a_sampler_that_its_data_cannot_serve_is_refused(fields: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        run_config(of("curriculum", fields))
