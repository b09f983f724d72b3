"""Composition of scripts, and rules that every script file keeps."""

import re
from importlib import resources

import pytest

from rollmesh.errors import StoreError
from rollmesh.mesh import DropReason, WasteReason
from rollmesh.store.scripts import Keys, Libraries, compose, load_scripts, lua_preamble
from rollmesh.types import TrajectoryState

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


LIBRARIES = Libraries(
    {
        "core": "local call = redis.call\nlocal SEEN, GONE = 1, 2",
        "first": "local function first(id)\n  return call('GET', id)  -- not a call of second()\nend",
        "second": "local function second(id)\n  return first(id) + SEEN\nend",
        "third": "local function third(id)\n  return first(second(id))\nend",
    }
)


@pytest.mark.parametrize("body", ["call('GET', K.mta)", "call('GET', grp_key(x))", "return S.leasd", "return R.lost"])
def test_an_unknown_key_in_a_script_is_found_at_load(body: str) -> None:
    with pytest.raises(KeyError, match="unknown keys, states or reasons"):
        compose("bad", f"#!lua\n{body}", LIBRARIES)


def test_a_script_without_flags_is_refused() -> None:
    with pytest.raises(StoreError, match="first line"):
        compose("bad", "return 1", LIBRARIES)


@pytest.mark.parametrize(
    ("text", "linked"),
    [
        ("return second(KEYS[1]) + GONE", ["local call", "local function first", "local function second"]),
        ("-- third()\nreturn {'first', x.second, SEEN}", ["local call"]),
        ("return x.y..first(1)", ["local call", "local function first"]),
        ("return 1", []),
    ],
)
def test_a_script_gets_the_libraries_that_it_uses_and_those_that_they_use_in_order_and_no_other(
    text: str, linked: list[str]
) -> None:
    found = LIBRARIES.linked(text)
    assert [part[: len(start)] for part, start in zip(found, linked, strict=True)] == linked
    assert compose("one", f"#!lua\n{text}", LIBRARIES).text.endswith("\n".join([*found, text]))


def test_a_name_of_two_libraries_is_refused() -> None:
    with pytest.raises(StoreError, match="call is defined in lib/second.lua and in lib/first.lua"):
        Libraries({"first": "local call = 1", "second": "local function call() end"})


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


def split_functions(text: str) -> dict[str, str]:
    """Split a library file into its top-level ``local`` statements, by every name they define; drops comment lines."""
    text = re.sub(r"^--.*\n", "", text, flags=re.MULTILINE)
    parts = re.split(r"^(?=local )", text, flags=re.MULTILINE)[1:]
    named = [(re.findall(r"^local (?:function )?(\w+(?:, \w+)*)", part), part.rstrip()) for part in parts]
    return {name: part for names, part in named for name in names[0].split(", ")}


FUNCTIONS = {name: part for text in LIBRARY.values() for name, part in split_functions(text).items()}


def test_lua_has_strings_in_single_quotes_and_comments_of_one_line() -> None:
    """``Libraries`` reads no other: a name in one would count as a use."""
    code = {name: re.sub(r"--.*|'[^'\n]*'", "", text) for name, text in (BODIES | LIBRARY).items()}
    assert [name for name, text in code.items() if '"' in text or "[[" in text] == []


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
