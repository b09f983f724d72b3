"""The environment of examples/, as a worker makes and calls it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rollmesh.tasks.environments.environment_protocol import EnvironmentReply, checked_reply, environment_factory
from rollmesh.types import Prompt

EXAMPLES = Path(__file__).parents[4] / "examples"
PROMPT = Prompt(prompt_id="e0-0", token_ids=np.array([1], np.int32), verifier="", metadata={"answer": 42})


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
    await environment.reset(PROMPT)
    replies = [checked_reply(await environment.step(turn, f"t:{at}:d")) for at, turn in enumerate(turns)]
    await environment.aclose()

    assert [reply.text for reply in replies if reply.text][: len(hints)] == hints
    if reward is None:
        assert replies == [EnvironmentReply(text="\nlower\n", done=False)]
    else:
        assert [reply.done for reply in replies] == [False] * (len(turns) - 1) + [True]
        assert replies[-1].reward == reward
