"""The calculator, and environments of the user."""

import re
import sys
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.errors import ConfigError
from rollmesh.tasks.environments.calculator import ArithmeticRejected, evaluate, format_value
from rollmesh.tasks.environments.environment_protocol import EnvironmentReply, checked_reply, environment_factory
from rollmesh.types import Prompt

EXAMPLES = Path(__file__).parents[4] / "examples"
OWN_PROMPT = Prompt(prompt_id="e0-0", token_ids=np.array([1], np.int32), verifier="", metadata={"answer": 42})


@pytest.mark.parametrize(
    ("turns", "hints", "reward"),
    [
        (["It is 42."], [], 1.0),
        (["50", "25, no: 40", "42"], ["\nlower\n", "\nhigher\n"], 0.5),
        (["1", "2", "3", "4"], ["\nhigher\n"] * 3, 0.0),
        (["no idea"], [], 0.0),
        (["9" * 5000], [], None),
    ],
)
async def test_the_environment_of_the_examples_answers_guesses_and_pays_for_few_of_them(
    turns: list[str], hints: list[str], reward: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    environment = environment_factory("own_environment:GuessNumber", {"most_guesses": 4})()
    await environment.reset(OWN_PROMPT)
    replies = [checked_reply(await environment.step(turn, f"t:{at}:d")) for at, turn in enumerate(turns)]
    await environment.aclose()

    assert [reply.text for reply in replies if reply.text][: len(hints)] == hints
    if reward is None:
        assert replies == [EnvironmentReply(text="\nlower\n", done=False)]
    else:
        assert [reply.done for reply in replies] == [False] * (len(turns) - 1) + [True]
        assert replies[-1].reward == reward


PROMPT = Prompt(prompt_id="p", token_ids=np.array([1], np.int32), verifier="exact", metadata={"answer": "84"})


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("12*7", "84"),
        (" 1 + 2 * 3 ", "7"),
        ("(1+2)*3", "9"),
        ("-3 - -4", "1"),
        ("7//2", "3"),
        ("-7 % 3", "2"),
        ("2**10", "1024"),
        ("2^10", "1024"),
        ("2**-2", "0.25"),
        ("1/3", "0.3333333333"),
        ("0.1+0.2", "0.3"),
        ("1e3", "1000"),
        ("10/4", "2.5"),
        ("10**300 / 3 * 3", "1" + "0" * 300),
        ("10**1000/3", "3" * 1000),
        ("(" * 95 + "1" + ")" * 95, "1"),
    ],
)
def test_arithmetic_is_exact(expression: str, result: str) -> None:
    assert format_value(evaluate(expression)) == result


REFUSED = """1/0; 1 % 0; 0**-1; 2 +; 9**9**9**9; 9**99999999; 2**0.5; 10**999 * 10**999; 1e999999999; 1e-999999999
__import__('os'); abs(1); a.b; 1 if 1 else 2; [1]; 'a'*9; 1, 2; 1j; 0x10; True; ...; \x00; é"""
TOO_LONG = ["(" * 150, "-" * 150 + "1", "1+" * 99 + "1", "1" * 201]


@pytest.mark.parametrize("expression", ["", "   ", *re.split("; |\n", REFUSED), *TOO_LONG])
def test_everything_else_is_refused_at_once(expression: str) -> None:
    start = time.thread_time()  # the work itself: a busy machine may delay any process
    with pytest.raises(ArithmeticRejected):
        evaluate(expression)
    assert time.thread_time() - start < 1.0


@given(st.text(alphabet="0123456789+-*/%^(). e", max_size=60))
def test_any_text_gives_a_bounded_number_or_a_refusal(expression: str) -> None:
    try:
        value = evaluate(expression)
    except ArithmeticRejected:
        return
    assert isinstance(value, Fraction)
    assert value.numerator.bit_length() <= 4096
    assert len(format_value(value)) < 1300


async def play(turns: list[str], **options: Any) -> list[EnvironmentReply]:
    environment = environment_factory("calculator", options)()
    await environment.reset(PROMPT)
    replies = [await environment.step(turn, f"t:{number}") for number, turn in enumerate(turns)]
    await environment.aclose()
    return replies


@pytest.mark.parametrize(
    ("turns", "options", "texts"),
    [
        (["I compute <calc>12*7</calc>", "so the answer is 84"], {}, ["<result>84</result>", ""]),
        (["<calc>1+1</calc> no, <calc>2+2</calc> then <calc>3+"], {}, ["<result>4</result>"]),
        (["<tool>3-1</tool>"], {"reply": "|user|{result}|assistant|", "tag": "tool"}, ["|user|2|assistant|"]),
    ],
    ids=["call and end", "last closed call", "turn markers of a chat model"],
)
async def test_the_last_call_is_answered_and_a_turn_without_one_ends_the_episode(
    turns: list[str], options: dict[str, Any], texts: list[str]
) -> None:
    assert await play(turns, **options) == [EnvironmentReply(text=text, done=not text) for text in texts]


@pytest.mark.parametrize("turn", ["", "<calc>1+1", "1+1</calc>", "</calc><calc>", "no call " * 10_000])
async def test_an_open_or_missing_call_ends_the_episode(turn: str) -> None:
    assert (await play([turn]))[0].done


async def test_a_wrong_call_is_answered_with_the_reason_so_that_the_policy_can_learn() -> None:
    replies = await play(["<calc>1/0</calc>", "<calc>import os</calc>", "<calc>" + "9" * 10_000 + "</calc>"])
    assert [reply.done for reply in replies] == [False] * 3
    assert replies[0].text == "<result>error: division by zero</result>"
    assert all("error:" in reply.text for reply in replies)


async def test_a_turn_sent_again_gets_the_same_reply() -> None:
    one, fresh = (environment_factory("calculator", {})() for _ in range(2))
    assert one.replayable
    replies = [await each.step("<calc>6*7</calc>", "e0-1.0:0") for each in (one, one, fresh)]
    assert replies == [EnvironmentReply(text="<result>42</result>", done=False)] * 3


OWN_ENVIRONMENT = """
from rollmesh.tasks.environments.environment_protocol import EnvironmentReply

class Echo:
    replayable = False
    def __init__(self, times=1): self.times = times
    async def reset(self, prompt): self.seen = []
    async def step(self, response_text, idempotency_key):
        self.seen.append(response_text)
        return EnvironmentReply(text=response_text * self.times, done=len(self.seen) > 1, reward=0.5)
    async def aclose(self): pass

class Half:
    async def reset(self, prompt): pass
"""


@pytest.fixture
def own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_environment_module.py").write_text(OWN_ENVIRONMENT)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "own_environment_module", raising=False)
    return "own_environment_module"


async def test_a_user_s_environment_is_created_once_per_trajectory(own_environment: str) -> None:
    make = environment_factory(f"{own_environment}:Echo", {"times": 2})
    one, other = make(), make()
    await one.reset(PROMPT)
    await other.reset(PROMPT)
    assert (await one.step("a", "k")).text == "aa"
    assert (await one.step("b", "k2")).done
    assert not (await other.step("c", "k3")).done


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("abacus", {}, "rollout.environment: 'abacus' is not one of calculator"),
        ("own_environment_module:Half", {}, "needs async step, aclose"),
        ("own_environment_module:Echo", {"size": 1}, "rollout.environment_options: .* rejects"),
        ("calculator", {"reply": "no place"}, "must contain {result}"),
        ("calculator", {"tag": "a b"}, "must be an identifier"),
    ],
)
def test_a_wrong_environment_is_a_config_error(
    own_environment: str, name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        environment_factory(name, options)
