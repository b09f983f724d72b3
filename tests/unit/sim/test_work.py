"""Lengths: forced by prompt and member, with the stated marginal and the stated share between prompts."""

import math
from dataclasses import replace

import numpy as np
import pytest

from rollmesh.errors import ConfigError
from rollmesh.sim.lengths import NAMED, LengthModel, Lognormal, Pareto, QuantileLine, parse_lengths
from rollmesh.sim.reward_model import RewardModel, RewardWorkers, SolveModel

from .meshes import mesh_settings


def model(marginal, share=0.5, cap=10**6, **more):
    return LengthModel(marginal=marginal, prompt_share=share, cap=cap, **more)


def test_a_member_has_its_length_whatever_the_number_of_members():
    lengths = model(Lognormal(median=1000, sigma=1.0))
    assert lengths.draw(7, 3, 16)[:4].tolist() == lengths.draw(7, 3, 4).tolist()
    assert lengths.draw(7, 3, 4).tolist() != lengths.draw(8, 4, 4).tolist()


@pytest.mark.parametrize("share", [0.06, 0.5, 0.92])
def test_the_share_between_prompts_is_the_one_that_anova_finds(share):
    """The intraclass correlation of groups of k: (MSB - MSW) / (MSB + (k - 1) MSW)."""
    lengths = model(Lognormal(median=5000, sigma=0.8), share)
    logs = np.log([lengths.draw(i, i, 8) for i in range(1500)])
    between, within = 8 * logs.mean(axis=1).var(ddof=1), logs.var(axis=1, ddof=1).mean()
    assert (between - within) / (between + 7 * within) == pytest.approx(share, abs=0.05)
    assert np.median(logs) == pytest.approx(math.log(5000), abs=0.08)
    assert logs.std() == pytest.approx(0.8, abs=0.05)


def test_the_cap_has_the_mass_of_the_longer_responses():
    lengths = model(NAMED["deepcoder-14b"].marginal, share=0.0, cap=16_000)
    drawn = np.concatenate([lengths.draw(i, i, 8) for i in range(500)])
    assert drawn.max() == 16_000
    assert (drawn == 16_000).mean() == pytest.approx(0.15, abs=0.02)


def test_quantiles_by_hand():
    z = np.array([0.0, 1.0])
    assert Lognormal(median=100, sigma=0.5).at(z).tolist() == pytest.approx([100, 100 * math.exp(0.5)])
    # Half of a Pareto distribution with index 1 lies below twice its shortest length.
    assert Pareto(shortest=10, index=1.0).at(z)[0] == pytest.approx(20)
    assert QuantileLine(points=((0.25, 10), (0.75, 1000))).at(z)[0] == pytest.approx(100)


def test_lengths_of_a_trace_are_scaled_to_another_cap():
    half = parse_lengths("deepcoder-14b:cap=8000")
    assert half.known_to == 8000
    z = np.array([-1.5, 0.0, 2.0])
    assert (2 * half.marginal.at(z)).tolist() == pytest.approx(NAMED["deepcoder-14b"].marginal.at(z).tolist())


def test_lengths_grow_by_the_stated_rate_per_batch():
    lengths = model(Lognormal(median=1000, sigma=0.0), growth_per_step=0.1)
    assert lengths.draw(0, 0, 1, step=2.0).tolist() == [1210]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("gamma:median=3", "gamma"),
        ("lognormal:median=3", "sigma"),
        ("lognormal:median=x,sigma=1", "median=x"),
        ("lognormal:median=-1,sigma=1", "greater than 0"),
        ("lognormal:median=nan,sigma=1", "finite number"),
        ("dapo-32b:cap=0", "dapo-32b:cap=0"),
        ("dapo-32b:cap=nan", "dapo-32b:cap=nan"),
        ("intern-s1-math:cap=8192", "a source with a known cap"),
    ],
)
def test_a_bad_description_is_refused_by_name(text, named):
    with pytest.raises(ConfigError, match=named):
        parse_lengths(text)


def test_a_share_above_one_is_refused():
    with pytest.raises(ConfigError, match="prompt_share"):
        model(Lognormal(median=1, sigma=1), share=1.2)


GROUPS = mesh_settings("sync").prompts


def test_groups_of_one_have_the_answers_of_a_group_of_four():
    ones = replace(GROUPS, repeats=4, groups_per_batch=16)
    for position in (0, 7, 60, 130):
        group, members = GROUPS.work(position, 4), [ones.work(4 * position + number, 1) for number in range(4)]
        assert [member.lengths[0] for member in members] == list(group.lengths)
        assert [member.rewards[0] for member in members] == list(group.rewards)
        assert [member.answer_id(0) for member in members] == [group.answer_id(number) for number in range(4)]
        assert {member.prompt_id for member in members} == {group.prompt_id}


def test_an_epoch_has_every_repeat_of_every_prompt():
    ones = replace(GROUPS, repeats=4)
    assert [ones.group_id(position) for position in (0, 239, 240)] == ["e0-0", "e0-239", "e1-0"]
    assert ones.work(239, 1).prompt_id == "p59"


def test_answers_wait_for_a_free_worker_in_order() -> None:
    workers = RewardWorkers(RewardModel(median_seconds=2.0, worker_count=2))
    assert [workers.known_at(now, f"g.{now}", 0) for now in (0.0, 0.5, 1.0, 10.0)] == [2.0, 2.5, 4.0, 12.0]


def test_scoring_times_are_lognormal_and_depend_on_the_answer_only() -> None:
    model = RewardModel(median_seconds=3.0, sigma=0.5, seed=7)
    seconds = [model.seconds(f"g{i}.0", 0) for i in range(4000)]
    logs = np.log(seconds)
    # Four standard errors of mean and standard deviation.
    assert np.mean(logs) == pytest.approx(math.log(3.0), abs=4 * 0.5 / math.sqrt(4000))
    assert np.std(logs) == pytest.approx(0.5, abs=4 * 0.5 / math.sqrt(8000))
    assert RewardModel(median_seconds=3.0, sigma=0.5, seed=7).seconds("g5.0", 0) == seconds[5]
    assert model.seconds("g5.0", 1) != seconds[5]
    assert RewardModel(median_seconds=3.0, sigma=0.5, seed=8).seconds("g5.0", 0) != seconds[5]


def test_prompts_have_uniform_probabilities() -> None:
    probabilities = [SolveModel().probability(prompt) for prompt in range(2000)]
    assert np.quantile(probabilities, (0.1, 0.5, 0.9)) == pytest.approx((0.1, 0.5, 0.9), abs=4 * 0.5 / math.sqrt(2000))


def test_spare_members_do_not_change_the_rewards_of_the_others() -> None:
    model = SolveModel(seed=3)
    assert model.rewards(9, 5, 16)[:8] == model.rewards(9, 5, 8)
    assert set(model.rewards(9, 5, 16)) <= {0.0, 1.0}
