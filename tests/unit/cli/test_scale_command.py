from pathlib import Path

import pytest

from rollmesh.cli.operations import parse_replicas
from rollmesh.config import RunConfig
from rollmesh.errors import ConfigError


def run(tmp_path: Path, **generator: object) -> RunConfig:
    sections = {"name": "r", "folder": str(tmp_path), "model": {"path": str(tmp_path)}, "generator": generator}
    return RunConfig.model_validate(sections)


def test_words_name_services_and_their_replicas(tmp_path: Path) -> None:
    assert parse_replicas(run(tmp_path), ["generator=3", "reward=default"]) == {"generator": 3, "reward": None}


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("generator", "expected SERVICE=N"),
        ("generator=", "expected SERVICE=N"),
        ("generator=-1", "expected SERVICE=N"),
        ("generator=two", "expected SERVICE=N"),
        ("trainer=2", "launcher.trainer_processes"),
        ("gateway=2", "gateway cannot be scaled"),
        ("generator=1000", "generator=1000: expected 0 to 256"),
    ],
)
def test_a_word_that_cannot_be_met_is_named(tmp_path: Path, word: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        parse_replicas(run(tmp_path), [word])


def test_generators_cannot_share_one_sglang_server(tmp_path: Path) -> None:
    config = run(tmp_path, engine="sglang", sglang={"url": "http://127.0.0.1:30000"})
    assert parse_replicas(config, ["generator=1"]) == {"generator": 1}
    with pytest.raises(ConfigError, match="generator=2: generators cannot share the server"):
        parse_replicas(config, ["generator=2"])
