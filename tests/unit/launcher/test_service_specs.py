"""The token that a run on one machine gets for its ports, and the plan by which its replicas are scaled."""

import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.config import load_run_config, write_run_config
from rollmesh.launcher.run_folder import RunFolder
from rollmesh.launcher.service_specs import TOKEN_FILE, child_environment, plan_replicas, with_mesh_token
from rollmesh.runtime.port_security import PortSecurity

from ...kit.run_files import made_run


def test_a_run_without_a_token_gets_one_that_only_its_owner_reads_and_its_services_accept(tmp_path: Path) -> None:
    folder = tmp_path / "a: folder #1 \U0001f600"
    config = with_mesh_token(made_run(folder), RunFolder(folder))
    file = folder / TOKEN_FILE
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    again = with_mesh_token(made_run(folder), RunFolder(folder))
    assert again == config
    write_run_config(made_run(folder), tmp_path / "config.yaml")
    service = load_run_config(tmp_path / "config.yaml", environ=child_environment(config, "unix:///redis.sock"))
    security = PortSecurity.from_config(service.security)
    assert security.sent_token == file.read_text().strip()
    assert security.tokens.refusal("Bearer guess")
    assert security.http_refusal("", verified_certificate=False) == ""


@pytest.mark.parametrize(
    "sections",
    [
        {"security": {"token": "its own"}},
        {"security": {"token_file": "tokens"}},
        {"security": {"tls": {"certificate": "c", "key": "k", "ca": "a"}}},
        {"launcher": {"host": "0.0.0.0"}},
    ],
)
def test_a_run_with_a_protection_of_its_own_or_with_other_machines_keeps_it(
    tmp_path: Path, sections: dict[str, Any]
) -> None:
    config = made_run(tmp_path, **sections)
    assert with_mesh_token(config, RunFolder(tmp_path)) == config
    assert not (tmp_path / TOKEN_FILE).exists()


def test_missing_replicas_start_at_once_and_surplus_ones_leave_from_the_top_one_at_a_time() -> None:
    assert plan_replicas(3, [0], []) == ([1, 2], None)
    assert plan_replicas(1, [0, 1, 2], []) == ([], 2)
    assert plan_replicas(0, [0], []) == ([], 0)
    assert plan_replicas(1, [0, 1, 2], [2]) == ([], None)
    # An index that drains is started again only once it has gone.
    assert plan_replicas(3, [0, 1, 2], [2]) == ([], None)
    assert plan_replicas(3, [0, 1], []) == ([2], None)


@given(
    wanted=st.lists(st.integers(0, 6), min_size=1, max_size=12),
    present=st.sets(st.integers(0, 8)),
    patience=st.integers(0, 3),
)
def test_whatever_is_asked_in_turn_the_replicas_end_as_the_last_wish_says(
    wanted: list[int], present: set[int], patience: int
) -> None:
    leaving: dict[int, int] = {}
    for wish in [*wanted, *[wanted[-1]] * 60]:
        missing, surplus = plan_replicas(wish, present, leaving)
        assert not set(missing) & present
        present |= set(missing)
        if surplus is not None:
            assert not leaving and surplus == max(present)
            leaving[surplus] = patience
        leaving = {index: left - 1 for index, left in leaving.items()}
        gone = {index for index, left in leaving.items() if left < 0}
        present -= gone
        leaving = {index: left for index, left in leaving.items() if index not in gone}
    assert present == set(range(wanted[-1]))
