"""Answers with code, scored in a real sandbox."""

from typing import Any

from rollmesh.tasks.verifiers.python_code import PythonCodeVerifier
from rollmesh.tasks.verifiers.verifier_protocol import RewardParts

WAIT_SECONDS = 60.0
"""Time for code that ends by itself, and for processes to go: a machine that stalls is no fault of theirs."""


def run(code: str, metadata: dict[str, Any], **options: Any) -> RewardParts:
    return PythonCodeVerifier(**{"timeout_seconds": WAIT_SECONDS, **options}).verify(code, metadata)
