"""Composition of scripts, and rules that every script file keeps."""

from __future__ import annotations

import re
from importlib import resources

import pytest

from rollmesh.errors import StoreError
from rollmesh.store.keys import Keys, lua_preamble
from rollmesh.store.scripts import Script, compose, load_scripts, split_helpers

SCRIPTS = load_scripts()
ALLOCATE = {
    "admit_replays",
    "append",
    "finish",
    "fork",
    "admit",
    "lease",
    "replay_letter",
    "keep_snapshot",
}
"""Scripts that take memory; every other script must run without any, or no script could free memory."""


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


HELPERS = """-- About all of them.
local call = redis.call
local SEEN, GONE = 1, 2

-- About the first.
local function first(id)
  return call('GET', id)  -- not a call of second()
end

local function second(id)
  return first(id) + SEEN
end

local function third(id)
  return second(third(id) .. 'first')
end
"""


def test_a_script_gets_the_helpers_that_it_needs_before_those_that_need_them_and_no_other() -> None:
    helpers = split_helpers(HELPERS)
    assert set(helpers) == {"call", "SEEN", "GONE", "first", "second", "third"}
    text = compose("one", "#!lua\nreturn second(KEYS[1]) + GONE", helpers).text
    order = [
        text.index(part) for part in ("local call", "local function first", "local function second", "return second")
    ]
    assert order == sorted(order)
    assert text.count("local SEEN, GONE") == 1
    assert "third" not in text


def test_a_name_in_a_text_a_comment_or_a_field_is_no_need() -> None:
    text = compose("one", "#!lua\n-- third()\nreturn {redis.call('first'), x.second}", split_helpers(HELPERS)).text
    assert "local function" not in text


def test_a_name_right_after_a_concatenation_is_a_need() -> None:
    assert "local function first" in compose("one", "#!lua\nreturn 'x'..first(KEYS[1])", split_helpers(HELPERS)).text


def test_helpers_that_need_each_other_are_refused() -> None:
    helpers = {"one": "local function one()\n  return two()\nend", "two": "local function two()\n  return one()\nend"}
    with pytest.raises(StoreError, match="depends on itself"):
        compose("bad", "#!lua\nreturn one()", helpers)


@pytest.mark.parametrize("body", ['return "first"', "--[[ first\n]] return 1", "return [[first]]"])
def test_text_in_which_names_would_be_misread_is_refused(body: str) -> None:
    with pytest.raises(StoreError, match="single quotes"):
        compose("bad", f"#!lua\n{body}", split_helpers(HELPERS))


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=lambda s: s.name)
def test_no_function_of_a_script_is_called_above_its_definition(script: Script) -> None:
    code = re.sub(r"--.*|'[^'\n]*'", "", script.text)
    for defined in re.finditer(r"^local function (\w+)", code, re.MULTILINE):
        above = code[: defined.start()]
        assert re.search(rf"\b{defined[1]}\(", above) is None, f"{defined[1]} is a global there"


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=lambda s: s.name)
def test_a_script_runs_without_memory_exactly_when_it_does_not_take_any(script: Script) -> None:
    assert ("allow-oom" in script.text.partition("\n")[0]) == (script.name not in ALLOCATE)


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=lambda s: s.name)
def test_a_script_names_keys_through_the_preamble_only(script: Script) -> None:
    text = script.text.partition("\n")[2]
    preamble = lua_preamble(text)
    assert text.startswith(preamble)
    for line in text.removeprefix(preamble).splitlines():
        code = line.partition("--")[0]
        assert "KEYS[" not in code
        assert "P .." not in code


FOLDER = resources.files("rollmesh.store") / "scripts"
BODIES = {f.name: f.read_text() for f in FOLDER.iterdir() if f.name.endswith(".lua")}
LIBRARY = {f.name: f.read_text() for f in (FOLDER / "lib").iterdir()}
HELPER_TEXTS = {name: part for text in LIBRARY.values() for name, part in split_helpers(text).items()}
READS = (
    "EXISTS|GET|HEXISTS|HGET|HGETALL|HKEYS|HLEN|HMGET|INFO|LLEN|LRANGE|SCARD|SISMEMBER|SMEMBERS|SRANDMEMBER|STRLEN|TIME"
    "|XRANGE|ZCARD|ZCOUNT|ZMSCORE|ZRANGE|ZRANGEBYSCORE|ZSCORE"
)
ON_ITS_OWN = "recovering"
"""Its writes are complete even if its caller refuses; it refuses only without a run, as a first call."""


def _using(pattern: str) -> re.Pattern[str]:
    """A regular expression for ``pattern`` and for calls of helpers that contain it, directly or through others."""
    names: set[str] = set()
    while True:
        found = re.compile("|".join([pattern, *(rf"\b{name}\(" for name in sorted(names))]))
        more = {
            name
            for name, part in HELPER_TEXTS.items()
            if name not in ("call", "fail", ON_ITS_OWN) and found.search(part.partition("\n")[2])
        }
        if more == names:
            return found
        names = more


WRITES, REFUSES = _using(rf"\bcall\('(?!(?:{READS})')[A-Z]+'"), _using(r"\bfail\(")


def half_way(text: str) -> str | None:
    """The refusal that may come after a write, or None: further down, or in the next round of the same loop."""
    code = re.sub(r"--.*", "", text)
    for loop in re.finditer(r"^( *)(?:for|while) .*?^\1end$", code, re.MULTILINE | re.DOTALL):
        refusal = REFUSES.search(loop[0])
        if refusal and WRITES.search(loop[0]):
            return f"in a loop that writes: {refusal[0]}"
    first = WRITES.search(code)
    after = REFUSES.search(code, first.end()) if first else None
    return after and f"after {first[0]}: {after[0]}" if first else None


@pytest.mark.parametrize("name", sorted(BODIES))
def test_a_script_refuses_before_its_first_write_or_not_at_all(name: str) -> None:
    """The server takes nothing back: what was written before a refusal stays, and no retry knows of it."""
    assert half_way(BODIES[name]) is None


@pytest.mark.parametrize("name", sorted(set(HELPER_TEXTS) - {"call", "fail", ON_ITS_OWN}))
def test_a_helper_refuses_before_its_first_write_or_not_at_all(name: str) -> None:
    assert half_way(HELPER_TEXTS[name].partition("\n")[2]) is None


@pytest.mark.parametrize(
    "text",
    [
        "call('HSET', 'x', 1)\nif y then fail('CONFLICT', 'y') end",
        "call('HSET', 'x', 1)\nrequire_leader(ARGV[1])",
        "for at = 1, 9 do\n  require_leader(ARGV[at])\n  count('x', 1)\n  flush_counts()\nend",
    ],
)
def test_a_refusal_after_a_write_is_found(text: str) -> None:
    assert half_way(text) is not None
