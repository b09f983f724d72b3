"""Repeated prompts: every position of the other source, several times in a row."""

from rollmesh.config.data import DataConfig
from rollmesh.tasks.sources.derived import RepeatedPrompts
from rollmesh.tasks.sources.source_protocol import build_prompt_source


def test_every_prompt_of_an_epoch_comes_as_often_as_it_is_repeated(tokenizer) -> None:
    source = build_prompt_source(DataConfig(), tokenizer, seed=3)
    repeated = RepeatedPrompts(source, 3)
    assert repeated.epoch_size == 3 * source.epoch_size
    ids = [repeated.prompt(1, index).prompt_id for index in range(9)]
    assert ids == [source.prompt(1, index).prompt_id for index in (0, 0, 0, 1, 1, 1, 2, 2, 2)]
    assert len(set(ids)) == 3
    last = repeated.epoch_size - 1
    assert repeated.prompt(0, last).prompt_id == source.prompt(0, source.epoch_size - 1).prompt_id
