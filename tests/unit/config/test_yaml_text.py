"""Text and numbers of a run file, of variables and of options."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from rollmesh.config import load_run_config, write_run_config
from rollmesh.config.store import parse_redis_url


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text("{name: trial, folder: runs/trial, model: {path: models/tiny}}")
    return file


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        ("network__host", "::", "::"),
        ("network__host", "fd00::", "fd00::"),
        ("network__host", "2001:10:20:30:40:50:60:7", "2001:10:20:30:40:50:60:7"),
        ("network__host", "12:30", "12:30"),
        ("network__host", "1e5", "1e5"),
        ("network__host", '"::1"', "::1"),
        ("network__host", "null", None),
        ("network__host", "", None),
        ("network__instance", "true", "true"),
        ("network__advertise_host", "[::1]", "[::1]"),
        ("name", "2024", "2024"),
        ("name", "null", "null"),
        ("model__path", "models/a #1", "models/a #1"),
        ("model__path", "{a: b}", "{a: b}"),
        ("checkpoints__folder", "2024-01-01", "2024-01-01"),
        ("schedule__preset", "sync", "sync"),
        ("store__url", "redis://[fd00::]:6379", "redis://[fd00::]:6379"),
        ("network__grpc_port", "017", 15),
        ("network__shared_folder", "false", False),
        ("data__source__type", "countdown", "countdown"),
    ],
)
def test_a_field_of_text_takes_any_text_from_a_variable_and_an_option(
    run_file: Path, variable: str, text: str, value: object
) -> None:
    keys = variable.split("__")
    for overrides, environ in (([], {f"ROLLMESH_{variable.upper()}": text}), ([f"{'.'.join(keys)}={text}"], {})):
        found = load_run_config(run_file, overrides, environ)
        for key in keys:
            found = getattr(found, key)
        assert found == value


def test_a_field_of_text_needs_no_quotes_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("name: 2024\nfolder: 1e5\nmodel: {path: 12:30}\nnetwork: {host: null, advertise_host: 10.0}\n")
    config = load_run_config(file, environ={})
    assert (config.name, config.folder, config.model.path) == ("2024", "1e5", "12:30")
    assert (config.network.host, config.network.advertise_host) == (None, "10.0")


def test_a_field_of_text_needs_no_quotes_in_a_section_that_an_option_or_a_variable_gives(run_file: Path) -> None:
    environ = {"ROLLMESH_NETWORK": "{host: 10.0, instance: 2024-01-01}"}
    config = load_run_config(run_file, ["data.source={type: jsonl, path: 0123}"], environ)
    assert (config.network.host, config.network.instance) == ("10.0", "2024-01-01")
    assert config.data.source.table_path == "0123"


# Values of YAML 1.2 (section 10.3.2 of its specification, and the numbers that Helm writes).
NUMBERS = {
    "1e-7": 1e-7,
    "1e-07": 1e-7,
    "5E+3": 5000.0,
    "1.5e3": 1500.0,
    ".5": 0.5,
    "-.5e1": -5.0,
    "3.": 3.0,
    "-12": -12,
    "0x1F": 31,
    "12:30": "12:30",
    "2024-07-26": "2024-07-26",
    "1e": "1e",
    "e5": "e5",
    "1.2.3": "1.2.3",
    "2001-12-14t21:59:43.10-05:00": "2001-12-14t21:59:43.10-05:00",
    "'1e-7'": "1e-7",
}


def test_numbers_of_free_options_are_those_of_yaml_1_2_and_come_back_from_the_written_file(tmp_path: Path) -> None:
    lines = [f"      o{n}: {text}\n" for n, text in enumerate(NUMBERS)]
    file = tmp_path / "run.yaml"
    file.write_text(
        "name: a\nfolder: r\nmodel: {path: m}\nrollout:\n  program: environment\n  environment: mine:World\n"
        f"  environment_options:\n{''.join(lines)}"
    )
    config = load_run_config(file, ["rollout.environment_options.set=1e-7"], environ={})
    expected = {f"o{n}": value for n, value in enumerate(NUMBERS.values())} | {"set": 1e-7}
    assert config.rollout.environment_options == expected
    write_run_config(config, tmp_path / "written.yaml")
    again = load_run_config(tmp_path / "written.yaml", environ={})
    assert again.rollout.environment_options == expected
    # Other readers, such as PyYAML itself, take 12:30 for 750 unless it is quoted.
    assert yaml.safe_load((tmp_path / "written.yaml").read_text())["rollout"]["environment_options"] == expected


def test_addresses_of_sentinels_have_no_brackets() -> None:
    found = parse_redis_url("rediss+sentinel://[fd00::1]:1,[::2],c/queue")
    assert found.hosts == (("fd00::1", 1), ("::2", 26379), ("c", 26379))
