"""Work of groups whose prompts repeat: the same answers as in groups of several."""

from dataclasses import replace

import pytest

from rollmesh.errors import ConfigError

from .meshes import mesh_settings

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


@pytest.mark.parametrize("field", ["count", "prompt_tokens", "repeats"])
def test_prompts_need_at_least_one_of_everything(field):
    with pytest.raises(ConfigError, match=f"prompts.{field}=0"):
        replace(GROUPS, **{field: 0})
