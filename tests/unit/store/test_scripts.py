"""How scripts are put together, and rules that every script file keeps."""

from __future__ import annotations

import pytest

from rollmesh.errors import StoreError
from rollmesh.store.keys import Keys, lua_preamble
from rollmesh.store.scripts import Script, compose, load_scripts

SCRIPTS = load_scripts()
ALLOCATE = {
    "append",
    "finish",
    "fork",
    "admit",
    "lease",
    "replay_letter",
    "request_evaluation",
    "init_run",
    "keep_snapshot",
}
"""What takes memory; every other script must run when there is none, or nothing would ever free any."""


def test_all_keys_of_a_run_share_its_hash_tag() -> None:
    keys = Keys("demo")
    assert keys.single("meta") == "{demo}:meta"
    assert keys.of("trajectory", "e0-1.2") == "{demo}:t:e0-1.2"
    with pytest.raises(KeyError):
        keys.single("mta")
    with pytest.raises(KeyError):
        keys.of("trajectories", "x")


def test_lua_and_python_build_the_same_names() -> None:
    text = lua_preamble("call('GET', K.meta, group_key(x), K.open)")
    assert "K = {meta = P .. 'meta', open = P .. 'open'}" in text
    assert "local function group_key(id) return P .. 'g:' .. id end" in text


@pytest.mark.parametrize("body", ["call('GET', K.mta)", "call('GET', grp_key(x))"])
def test_an_unknown_key_in_a_script_is_found_at_load(body: str) -> None:
    with pytest.raises(KeyError, match="unknown keys"):
        compose("bad", f"#!lua\n{body}", {"core": ""})


def test_a_script_without_flags_is_refused() -> None:
    with pytest.raises(StoreError, match="first line"):
        compose("bad", "return 1", {"core": ""})


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=lambda s: s.name)
def test_a_script_runs_without_memory_exactly_when_it_does_not_take_any(script: Script) -> None:
    assert ("allow-oom" in script.text.partition("\n")[0]) == (script.name not in ALLOCATE)


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=lambda s: s.name)
def test_a_script_names_keys_through_the_preamble_only(script: Script) -> None:
    body = script.text.partition("local call = redis.call")[2]
    assert body
    for line in body.splitlines():
        code = line.partition("--")[0]
        assert "KEYS[" not in code
        assert "P .." not in code
