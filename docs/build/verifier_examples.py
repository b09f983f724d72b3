"""Examples of the built-in verifiers: options, an answer, and its reward. A test scores them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierExample:
    """One scored answer."""

    options: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    response: str
    reward: float | None
    """None where the reward is that of another service."""


VERIFIER_EXAMPLES: Mapping[str, VerifierExample] = MappingProxyType(
    {
        "exact": VerifierExample(
            options={"extract": "tag:answer", "ignore_case": True},
            metadata={"answer": "Paris"},
            response="It is <answer>paris</answer>",
            reward=1.0,
        ),
        "numeric": VerifierExample(
            options={"tolerance": 0.01},
            metadata={"answer": "#### 42"},
            response="So there are 42.1 of them",
            reward=1.0,
        ),
        "choice": VerifierExample(
            options={"letters": "ABCD"}, metadata={"answer": "B"}, response="The answer is (B).", reward=1.0
        ),
        "regex": VerifierExample(options={"pattern": "<answer>.*</answer>"}, response="<answer>4</answer>", reward=1.0),
        "math": VerifierExample(metadata={"answer": "\\frac{1}{2}"}, response="Therefore \\boxed{0.5}", reward=1.0),
        "countdown": VerifierExample(
            metadata={"numbers": [2, 5, 8], "target": 7}, response="2 + 5 = 7 ~ 7 = 0 !", reward=1.0
        ),
        "reasoning_gym": VerifierExample(response="<answer>7</answer>", reward=None),
        "python_code": VerifierExample(
            options={"partial_credit": True},
            metadata={
                "entry_point": "double",
                "tests": [{"args": [2], "expected": 4}, {"args": ["ab"], "expected": "abab"}],
            },
            response="def double(x):\n    return 2 * x",
            reward=1.0,
        ),
        "http_judge": VerifierExample(
            options={"url": "http://127.0.0.1:9000/score", "timeout_seconds": 5.0},
            metadata={"answer": "42"},
            response="42",
            reward=None,
        ),
        "composite": VerifierExample(
            options={
                "parts": {
                    "answer": {"verifier": "numeric", "weight": 1.0},
                    "format": {"verifier": "regex", "weight": 0.1, "options": {"pattern": "#### \\d+", "full": False}},
                }
            },
            metadata={"answer": 42},
            response="It is 42",
            reward=1.0,
        ),
    }
)
