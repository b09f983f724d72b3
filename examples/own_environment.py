"""An environment of your own: the policy guesses the number of the row's answer, and is told higher or lower.

data:
  source: {type: jsonl, path: numbers.jsonl}    # {"prompt": "Guess a number from 1 to 100.", "answer": 42}
rollout:
  program: environment
  environment: own_environment:GuessNumber
  environment_options: {most_guesses: 7}
  max_turns: 7
"""

import re

from rollmesh.tasks.environments.environment_protocol import EnvironmentReply
from rollmesh.types import Prompt


class GuessNumber:
    """One game; the reward is 1 for a hit at once and less for each further guess, so no verifier is asked."""

    replayable = True

    def __init__(self, most_guesses: int = 7) -> None:
        self._most = most_guesses
        self._guesses = 0

    async def reset(self, prompt: Prompt) -> None:
        """Take the number from the row; all of its fields but the prompt are in the metadata."""
        self._number = int(prompt.metadata["answer"])

    async def step(self, response_text: str, idempotency_key: str) -> EnvironmentReply:
        """Compare the last number of the turn; whatever a policy writes is an answer, never an error."""
        self._guesses += 1
        found = re.findall(r"\d{1,9}", response_text)
        if found and int(found[-1]) == self._number:
            return EnvironmentReply(text="", done=True, reward=1 - (self._guesses - 1) / self._most)
        if not found or self._guesses == self._most:
            return EnvironmentReply(text="", done=True, reward=0.0)
        hint = "higher" if int(found[-1]) < self._number else "lower"
        return EnvironmentReply(text=f"\n{hint}\n", done=False)

    async def aclose(self) -> None:
        """Do nothing: a game holds no resources."""
