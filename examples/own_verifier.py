"""A verifier of your own: a class with options, named parts and the text of the prompt.

reward:
  verifier: own_verifier:ShortAnswer
  options: {longest: 200}
"""

from collections.abc import Mapping
from typing import Any

from rollmesh.tasks.verifiers.verifier_protocol import RewardParts


class ShortAnswer:
    """1 for an answer that ends with the reference, and up to 0.1 more if it is short without the prompt in it."""

    timeout_means_wrong = False
    needs_prompt = True

    def __init__(self, longest: int = 200) -> None:
        self._longest = longest

    def verify(self, response: str, prompt_metadata: Mapping[str, Any]) -> RewardParts:
        right = float(response.strip().endswith(str(prompt_metadata["answer"])))
        short = max(0.0, 1 - len(response) / self._longest)
        repeated = prompt_metadata["prompt"].strip() in response
        bonus = 0.0 if repeated else 0.1 * right * short
        return RewardParts(value=right + bonus, parts={"right": right, "short": bonus})
