"""Run files in which a policy learns from teachers, and those in which it could not."""

import pytest

from rollmesh.errors import ConfigError
from rollmesh.scheduling import Schedule

from ...kit.run_files import run_config

TEACHER = "teachers.large.model=models/large"
OBJECTIVE = "trainer.algorithm.teacher.reverse_kl_coefficient=1"
REWARD = "trainer.algorithm.teacher.with_reward=true"
FORWARD = "trainer.algorithm.teacher.forward_kl_coefficient=1"
TWO = "teachers.a.model=a teachers.a.domains=[easy] teachers.a.top_k=4 teachers.b.model=b"
ALONE = f"{TEACHER} {OBJECTIVE}"
PARTS = (
    'data.source={"type":"mixture","parts":['
    '{"name":"easy","weight":0.5,"source":{"type":"countdown","max_numbers":3}},'
    '{"name":"hard","weight":0.5,"source":{"type":"countdown"}}]}'
)
ROWS = 'data.source={"type":"jsonl","path":"rows.jsonl"}'


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        (TEACHER, "teachers: the policy would learn nothing .* set trainer.algorithm.teacher"),
        ("trainer.algorithm.kl_reference=teacher", "kl_reference=teacher: there is no teacher to learn from"),
        (f"{ALONE} trainer.algorithm.kl_reference=teacher", "=teacher: nothing reads a reference; set kl_coefficient"),
        (OBJECTIVE, "trainer.algorithm.teacher: there is no teacher to learn from; set teachers"),
        (f"{TEACHER} trainer.algorithm.teacher.discount=1", "=0: the teachers would teach nothing"),
        (f"{TEACHER} {FORWARD}", "teachers.large.top_k=0: .*forward_kl_coefficient needs top tokens"),
        (
            f"{TEACHER} {FORWARD} teachers.large.top_k=4 trainer.algorithm.teacher.discount=1",
            "discount=1: is of the rev",
        ),
        (
            f"{FORWARD} {PARTS} {TWO} teachers.b.top_k=5",
            "teachers.b.top_k=5: .* of every teacher the same number",
        ),
        (f"{ALONE} trainer.algorithm.advantage=rloo", "=rloo: the reward takes no part .*with_reward=true"),
        (f"{ALONE} schedule.filter_zero_variance=true", "filter_zero_variance=true: the reward takes no part"),
        (f"{ALONE} curriculum.group_shaper=dot", "group_shaper=dot: the reward takes no part"),
        (f"{ALONE} {PARTS} teachers.large.domains=[easy]", "teachers: none has the prompts of domain hard"),
        (f"{ALONE} {PARTS} teachers.large.domains=[easy,code]", "no domain code; its domains are easy, hard"),
        (f"{ALONE} teachers.other.model=m", "other.domains: the prompts of no other teacher is of teachers.large"),
        (
            f"{ALONE} {PARTS} teachers.other.model=m teachers.other.domains=[easy] teachers.large.domains=[hard,easy]",
            "domain easy is of teachers.",
        ),
    ],
)
def test_a_run_in_which_the_policy_could_not_learn_so_is_refused(fields: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        run_config(fields)


@pytest.mark.parametrize(
    "fields",
    [
        ALONE,
        f"{TEACHER} trainer.algorithm.kl_reference=teacher trainer.algorithm.kl_coefficient=0.1",
        f"{ALONE} {REWARD} trainer.algorithm.advantage=rloo reward.overlong_buffer_tokens=8",
        f"{ALONE} {PARTS} teachers.other.model=m teachers.other.domains=[easy]",
        f"{ALONE} {PARTS} teachers.large.domains=[easy,hard]",
        # Only the rows tell their domains: the trainer refuses a batch with a prompt of another one.
        f"{ALONE} {ROWS} data.domain_field=topic teachers.large.domains=[code]",
    ],
)
def test_a_run_in_which_every_prompt_has_a_teacher_is_accepted(fields: str) -> None:
    Schedule.from_config(run_config(fields))


@pytest.mark.parametrize("schedule", ["schedule.group_size=1", "schedule.preset=sorted"])
def test_a_group_may_have_one_member_while_the_reward_takes_no_part(schedule: str) -> None:
    assert Schedule.from_config(run_config(f"{ALONE} {schedule}")).group_size == 1
    with pytest.raises(ConfigError, match="members of a group"):
        Schedule.from_config(run_config(f"{ALONE} {schedule} {REWARD}"))
