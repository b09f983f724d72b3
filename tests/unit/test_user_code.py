"""Modules of a user's code are found beside the run file, and in the working directory."""

import os
import sys
from pathlib import Path

import pytest

from rollmesh.config import load_run_config
from rollmesh.errors import ConfigError
from rollmesh.user_code import CODE_FOLDER, load_target, record_code_folder, search_beside


@pytest.fixture(autouse=True)
def own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv(CODE_FOLDER, "")  # restored after the test, whatever it sets


def test_a_module_beside_the_run_file_is_found_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("beside", "elsewhere"):
        (tmp_path / name).mkdir()
    (tmp_path / "beside" / "beside_the_run_file.py").write_text("VALUE = 7\n")
    (tmp_path / "beside" / "run.yaml").write_text(
        "{name: a, folder: r, model: {path: 'recipe:countdown'}, generator: {max_context_tokens: 2048}}"
    )
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="no module 'beside_the_run_file'"):
        load_target("beside_the_run_file:VALUE", "reward.verifier")
    search_beside(Path("../beside/run.yaml"))
    assert load_target("beside_the_run_file:VALUE", "reward.verifier") == 7
    # Services find the folder in their environment, and it is no field of the run file.
    assert os.environ[CODE_FOLDER] == str(tmp_path / "beside")
    assert load_run_config("../beside/run.yaml").name == "a"


def test_the_copy_in_a_run_folder_leads_to_the_folder_of_the_run_file_also_when_a_run_continues_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_folder = tmp_path / "runs" / "a"
    run_folder.mkdir(parents=True)
    search_beside(run_folder / "config.yaml")
    assert os.environ[CODE_FOLDER] == str(run_folder), "nothing is recorded"
    search_beside(tmp_path / "mine" / "run.yaml")
    record_code_folder(run_folder)
    for _ in range(2):
        monkeypatch.setenv(CODE_FOLDER, "")
        record_code_folder(run_folder)  # of a process that has read no run file: the record stays
        search_beside(run_folder / "config.yaml")
        assert os.environ[CODE_FOLDER] == str(tmp_path / "mine")
        record_code_folder(run_folder)


def test_a_module_beside_the_run_file_hides_no_installed_one(tmp_path: Path) -> None:
    (tmp_path / "fractions.py").write_text("Fraction = None\n")
    search_beside(tmp_path / "run.yaml")
    assert load_target("fractions:Fraction", "reward.verifier") is not None


def test_a_missing_module_names_both_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    search_beside(tmp_path / "inner" / "run.yaml")
    with pytest.raises(ConfigError) as raised:
        load_target("absent_module_z:f", "reward.verifier")
    assert f"(installed, on PYTHONPATH or in {tmp_path / 'inner'} or {tmp_path}) for 'absent_module_z:f'" in str(
        raised.value
    )
