"""Composition of scripts, and rules that every script file keeps."""

from __future__ import annotations

import re
from importlib import resources

import pytest

from rollmesh.errors import StoreError
from rollmesh.mesh import DropReason, WasteReason
from rollmesh.store.scripts import Keys, compose, load_scripts, lua_preamble
from rollmesh.types import TrajectoryState

from .lua_source import header_problem, split_functions

SCRIPTS = load_scripts()
ALLOCATE = {
    "admit_replays",
    "append",
    "extend_group",
    "finish",
    "fork",
    "admit",
    "lease",
    "recall",
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


@pytest.mark.parametrize("body", ["call('GET', K.mta)", "call('GET', grp_key(x))", "return S.leasd", "return R.lost"])
def test_an_unknown_key_in_a_script_is_found_at_load(body: str) -> None:
    with pytest.raises(KeyError, match="unknown keys, states or reasons"):
        compose("bad", f"#!lua\n-- uses:\n{body}", {})


def test_a_script_without_flags_is_refused() -> None:
    with pytest.raises(StoreError, match="first line"):
        compose("bad", "return 1", {})


LIBRARIES = {
    "core": "-- uses:\nlocal call = redis.call\nlocal SEEN, GONE = 1, 2",
    "first": "-- uses: core\nlocal function first(id)\n  return call('GET', id)  -- not a call of second()\nend",
    "second": "-- uses: core first\nlocal function second(id)\n  return first(id) + SEEN\nend",
    "third": "-- uses: first second\nlocal function third(id)\n  return first(second(id))\nend",
}


def test_a_script_gets_the_libraries_that_it_lists_and_those_that_they_list_in_order_and_no_other() -> None:
    text = compose("one", "#!lua\n-- uses: core second\nreturn second(KEYS[1]) + GONE", LIBRARIES).text
    order = [
        text.index(part) for part in ("local call", "local function first", "local function second", "return second")
    ]
    assert order == sorted(order)
    assert text.count("local SEEN, GONE") == 1
    assert "third" not in text


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("return 1", "is missing"),
        ("-- uses: core fourth\nreturn 1", r"no library file fourth; there are back, bare, core"),
        ("-- uses: loop\nreturn 1", r"lib/back.lua: library file loop uses itself: loop -> back -> loop"),
        ("-- uses: bare\nreturn 1", r"lib/bare.lua: .* is missing"),
    ],
)
def test_a_header_that_cannot_be_followed_is_refused(text: str, problem: str) -> None:
    libraries = {**LIBRARIES, "loop": "-- uses: back\n", "back": "-- uses: loop\n", "bare": "local x = 1"}
    with pytest.raises(StoreError, match=problem):
        compose("bad", f"#!lua\n{text}", libraries)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("-- uses: core first\nreturn first(call('GET', 'x'))", None),
        ("-- uses: core\nreturn first(call('GET', 'x'))", "it calls first and does not list it"),
        ("-- uses: core first\nreturn call('GET', 'x')", "it lists first and does not call it"),
        ("-- uses: core\n-- third()\nreturn {call('first'), x.second}", None),
        ("-- uses:\nreturn 'x'..second(1)", "it calls second and does not list it"),
        ("-- uses:\nreturn x.y..third(1)", "it calls third and does not list it"),
        ('-- uses:\nreturn "first"', "single quotes"),
        ("-- uses:\n--[[ first\n]] return 1", "single quotes"),
        ("-- uses:\nreturn [[first]]", "single quotes"),
    ],
)
def test_a_missing_or_unused_header_entry_is_found(text: str, problem: str | None) -> None:
    found = header_problem("one", text, LIBRARIES)
    assert found is None if problem is None else found is not None and problem in found


def test_no_function_of_a_script_is_called_above_its_definition() -> None:
    found = []  # each would be a global there
    for script in SCRIPTS.values():
        code = re.sub(r"--.*|'[^'\n]*'", "", script.text)
        for defined in re.finditer(r"^local function (\w+)", code, re.MULTILINE):
            if re.search(rf"\b{defined[1]}\(", code[: defined.start()]):
                found.append((script.name, defined[1]))
    assert found == []


def test_a_script_runs_without_memory_exactly_when_it_does_not_take_any() -> None:
    taking = {script.name for script in SCRIPTS.values() if "allow-oom" not in script.text.partition("\n")[0]}
    assert taking == ALLOCATE


def test_a_script_names_states_through_the_preamble_only() -> None:
    named = re.compile(rf"(?:'state',|[=~]=) '({'|'.join(TrajectoryState)})'")
    assert {s.name: found[1] for s in SCRIPTS.values() if (found := named.search(s.text))} == {}


def test_a_script_names_reasons_of_drops_and_waste_through_the_preamble_only() -> None:
    words = {*DropReason, *WasteReason} - set(TrajectoryState)
    named = re.compile(rf"'(?:tokens:)?({'|'.join(sorted(words))})'|'({'|'.join(WasteReason)}):'|waste\([^,]+, '")
    assert {f: found[0] for f, text in [*BODIES.items(), *LIBRARY.items()] if (found := named.search(text))} == {}


def test_a_script_names_keys_through_the_preamble_only() -> None:
    found = []
    for script in SCRIPTS.values():
        text = script.text.partition("\n")[2]
        preamble = lua_preamble(text)
        assert text.startswith(preamble), script.name
        for line in text.removeprefix(preamble).splitlines():
            code = line.partition("--")[0]
            if "KEYS[" in code or "P .." in code:
                found.append((script.name, line))
    assert found == []


FOLDER = resources.files("rollmesh.store") / "scripts"
BODIES = {f.name: f.read_text() for f in FOLDER.iterdir() if f.name.endswith(".lua")}
LIBRARY = {f.name.removesuffix(".lua"): f.read_text() for f in (FOLDER / "lib").iterdir()}
FUNCTIONS = {name: part for text in LIBRARY.values() for name, part in split_functions(text).items()}


def test_the_header_of_a_file_lists_exactly_the_libraries_that_it_calls() -> None:
    texts = {name: body.partition("\n")[2] for name, body in BODIES.items()} | LIBRARY
    assert [problem for name, text in texts.items() if (problem := header_problem(name, text, LIBRARY))] == []


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
            for name, part in FUNCTIONS.items()
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


def test_a_script_refuses_before_its_first_write_or_not_at_all() -> None:
    """The server takes nothing back: what was written before a refusal stays, and no retry knows of it."""
    assert {name: refusal for name, body in BODIES.items() if (refusal := half_way(body))} == {}


def test_a_helper_refuses_before_its_first_write_or_not_at_all() -> None:
    helpers = {name: FUNCTIONS[name].partition("\n")[2] for name in set(FUNCTIONS) - {"call", "fail", ON_ITS_OWN}}
    assert {name: refusal for name, body in helpers.items() if (refusal := half_way(body))} == {}


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
