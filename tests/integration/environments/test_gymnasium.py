"""Episodes of Gymnasium's own environments, and of classes that have the same methods."""

import asyncio
import threading

import numpy as np
import pytest

from rollmesh.errors import ConfigError
from rollmesh.tasks.environments.environment_protocol import EnvironmentFailed, EnvironmentReply, environment_factory
from rollmesh.types import Prompt

from .documented import documented

MOVES = {"left": 0, "down": 1, "right": 2, "up": 3}
LAKE = {
    "target": "gymnasium:FrozenLake-v1",
    "arguments": {"is_slippery": False, "render_mode": "ansi"},
    "action": MOVES,
    "observation": "render()",
}
"""S F F F / F H F H / F F F H / H F F G: two downs, two rights, a down and a right lead to the goal."""


async def play(turns, options, **metadata):
    prompt = Prompt(prompt_id="p", token_ids=np.array([1], np.int32), verifier="", metadata=metadata)
    environment = environment_factory("gymnasium", options)()
    try:
        return [await environment.reset(prompt), *[await environment.step(turn, f"t:{turn}") for turn in turns]]
    finally:
        await environment.aclose()


async def test_the_frozen_lake_is_crossed_in_words():
    pytest.importorskip("gymnasium")
    way = ["Go down.", "DOWN", "not left but right", "right", "down", "right"]
    first, *replies = await play(way, LAKE)
    assert first.text == "\n\x1b[41mS\x1b[0mFFF\nFHFH\nFFFH\nHFFG\n"
    assert [reply.done for reply in replies] == [False] * 5 + [True]
    assert [reply.reward for reply in replies] == [0.0] * 5 + [1.0]
    here = "\x1b[41mF\x1b[0m"
    grids = [f"SFFF\n{here}HFH\nFFFH\nHFFG\n", f"SFFF\nFHFH\n{here}FFH\nHFFG\n"]
    assert [reply.text for reply in replies[:2]] == [f"  (Down)\n{grid}" for grid in grids]
    *_, hole = await play(["down", "right"], LAKE)
    assert (hole.done, hole.reward) == (True, 0.0)


@pytest.mark.parametrize("example", [0, 1])
async def test_the_documented_runs_play(example):
    pytest.importorskip("gymnasium")
    first, reply = await play(["I go right."], documented("gymnasium")[example])
    assert "FHFH" in first.text and "(Right)" in reply.text
    assert first.text.endswith("assistant\n") == reply.text.endswith("assistant\n") == bool(example)


@pytest.mark.parametrize("ends_unread", [False, True])
async def test_an_action_that_cannot_be_read_or_is_not_in_the_space_is_told_or_ends_the_episode(ends_unread):
    pytest.importorskip("gymnasium")
    taxi = {"target": "gymnasium:Taxi-v4", "action": "integer", "ends_unread": ends_unread}
    first, none, outside, south = await play(["north", "take 6", "0 then 1: 0"], taxi, seed=3)
    assert 0 <= int(first.text) < 500
    assert none == EnvironmentReply(text="error: no whole number in the turn", done=ends_unread, reward=0.0)
    assert outside.text == "error: 6 is not in Discrete(6)" and outside.done is ends_unread
    assert south == EnvironmentReply(text=south.text, done=False, reward=-1.0)
    _, unknown = await play(["jump"], LAKE)
    assert unknown.text == "error: no action in the turn; actions are left, down, right, up"


async def test_equal_seeds_begin_and_go_on_alike():
    pytest.importorskip("gymnasium")
    slippery = {**LAKE, "arguments": {"is_slippery": True, "render_mode": "ansi"}}
    games = [await play(["right"] * 20, slippery, seed=seed) for seed in (5, 5, 6)]
    assert games[0] == games[1] != games[2]


class Words:
    """A text environment of the four results that Gym had before 0.26, with messages for observations."""

    def __init__(self, last="end"):
        self.last = last
        self.threads = set()

    def reset(self, seed=None, options=None):
        self.threads.add(threading.get_ident())
        self.word = options["word"]
        return [{"role": "user", "content": f"Say {self.word}"}, {"role": "user", "content": f"or {self.last}."}]

    def step(self, action):
        self.threads.add(threading.get_ident())
        assert len(self.threads) == 1 and threading.get_ident() != threading.main_thread().ident
        said = {"seen": {"words": action.upper(), (0, 1): np.arange(2)}}
        return said if action == "wrong" else (said, np.float32(action == self.word), action == self.last, {})


WORDS = {"target": f"{__name__}:Words", "reset_fields": ["word"]}


async def test_a_class_of_ones_own_plays_in_one_thread_of_its_episode(monkeypatch):
    options = {**WORDS, "arguments": {"last": "bye"}, "reply": "<{text}>"}
    first, *replies = await play(["yes", " yes\n", "bye"], options, word="yes")
    assert first.text == "Say yes\nor bye."
    assert replies[0] == EnvironmentReply(text='<{"seen": {"words": "YES", "(0, 1)": [0, 1]}}>', done=False, reward=1.0)
    assert [(reply.reward, reply.done) for reply in replies] == [(1.0, False), (2.0, False), (2.0, True)]
    _, said = await play(["no"], {**WORDS, "observation": "", "reward": "verifier"}, word="yes")
    assert said.reward is None
    with pytest.raises(EnvironmentFailed, match="step returned {'seen'.*expected \\(observation, reward, terminated"):
        await play(["wrong"], WORDS, word="yes")


class Slow(Words):
    gate = threading.Event()

    def step(self, action):
        self.gate.wait()
        return super().step(action)


async def test_an_environment_that_blocks_stops_no_other_and_not_its_own_end():
    slow = environment_factory("gymnasium", {**WORDS, "target": f"{__name__}:Slow"})()
    row = Prompt(prompt_id="p", token_ids=np.array([1], np.int32), verifier="", metadata={"word": "yes"})
    await slow.reset(row)
    step = asyncio.create_task(slow.step("yes", "t:0"))
    assert (await play(["end"], WORDS, word="yes"))[-1].done
    assert not step.done()
    step.cancel()
    await slow.aclose()
    Slow.gate.set()


class Leaves(Words):
    def step(self, action):
        raise {"exit": SystemExit, "stop": StopIteration}[action]


@pytest.mark.parametrize("action", ["exit", "stop"])
async def test_an_environment_that_leaves_its_process_fails_its_episode_alone(action):
    with pytest.raises(RuntimeError, match="SystemExit|StopIteration"):
        await play([action], {**WORDS, "target": f"{__name__}:Leaves"}, word="yes")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target": "words"}, "options.target: 'words' must have the form module:name"),
        ({"target": "no_such_module:Words"}, "options.target: no module 'no_such_module'"),
        ({"target": f"{__name__}:MOVES"}, "options.target: .*MOVES is not callable"),
        ({"action": "number"}, "options.action: 'number' is none of text, integer"),
        ({"first": "go"}, "options.first: 'go' must contain {text}"),
    ],
)
def test_a_wrong_option_is_named(options, words):
    with pytest.raises(ConfigError, match=words):
        environment_factory("gymnasium", {**WORDS, **options})


def test_an_id_that_is_not_registered_is_named():
    pytest.importorskip("gymnasium")
    with pytest.raises(ConfigError, match="options.target: gymnasium:FrozenPond-v1: .*FrozenPond"):
        environment_factory("gymnasium", {"target": "gymnasium:FrozenPond-v1"})
