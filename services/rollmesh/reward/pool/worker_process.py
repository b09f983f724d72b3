"""A worker process: confines itself, then scores one answer after another, bytes in and bytes out."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from typing import Any

from rollmesh.errors import DataError, VerifierError
from rollmesh.reward.answer_text import answer_text
from rollmesh.reward.outcomes import timed_out, verifier_error
from rollmesh.reward.pool.confinement import WorkerConfinement, allow_cpu, confine_worker
from rollmesh.reward.pool.isolation import probe_worker
from rollmesh.reward.pool.pipe_frames import LARGEST_REQUEST_BYTES, frame, receive_frame
from rollmesh.tasks.sources.agent import plain_text_of
from rollmesh.tasks.verifiers.verifier_protocol import Verifier, checked_reward
from rollmesh.text import Tokenizer
from rollmesh.types import OutcomeKind, Prompt, RewardOutcome
from rollmesh.user_code import described
from rollmesh.wire.reward_messages import ScoreItem, outcome_to_bytes, score_item_from_bytes

SCORE = b"S"
PROBE = b"P"


class RewardHandler:
    """Scorer of one answer at a time, with the verifiers loaded before the process was confined."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        verifiers: Mapping[str, Verifier],
        default: str,
        marker: str | None = "",
    ) -> None:
        """``default`` is the verifier of prompts without a verifier; answers follow ``marker`` (``answer_text``)."""
        self._tokenizer = tokenizer
        self._verifiers = verifiers
        self._default = default
        self._marker = marker
        self.needs_replacement = False
        """True if the process must be replaced because it ran out of memory."""

    def __call__(self, payload: bytes) -> bytes:
        """Score one encoded item; never raises."""
        try:
            return outcome_to_bytes(self._score(score_item_from_bytes(payload)))
        except DataError as error:
            return outcome_to_bytes(verifier_error(str(error)))
        except MemoryError:
            self.needs_replacement = True
            return outcome_to_bytes(
                verifier_error("MemoryError: the verifier process exceeded reward.memory_limit_bytes")
            )

    def _score(self, item: ScoreItem) -> RewardOutcome:
        name = item.prompt.verifier or self._default
        verifier = self._verifiers.get(name)
        if verifier is None:
            return verifier_error(f"this run has no verifier {name!r}; it has {', '.join(sorted(self._verifiers))}")
        response = answer_text(item, self._tokenizer, self._marker, name)
        metadata = prompt_metadata(item.prompt, verifier, self._tokenizer)
        try:
            reward = checked_reward(verifier.verify(response, metadata), name)
        except TimeoutError as error:
            return timed_out(str(error) or f"{name}: the verifier's time limit expired", verifier.timeout_means_wrong)
        except VerifierError as error:
            return verifier_error(str(error))
        except MemoryError:
            raise
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # any exception of a verifier becomes an outcome
            return verifier_error(f"{name}: {described(error)}")
        return RewardOutcome(kind=OutcomeKind.SCORED, value=reward.value, parts=reward.parts)


def prompt_metadata(prompt: Prompt, verifier: Verifier, tokenizer: Tokenizer) -> Mapping[str, Any]:
    """Return the prompt's metadata, with the prompt's text if the verifier requires it."""
    if not getattr(verifier, "needs_prompt", False):
        return prompt.metadata
    return {**prompt.metadata, "prompt": plain_text_of(prompt, tokenizer)}


def run_worker(
    connection: socket.socket,
    handler: RewardHandler,
    confinement: WorkerConfinement,
    birth: int,
    *,
    timeout_seconds: float,
    item_count: int,
) -> None:
    """Serve up to ``item_count`` requests, or until the service disconnects or the handler needs a replacement."""
    confine_worker(confinement, birth)
    requests = connection.makefile("rb")
    for _ in range(item_count):
        request = receive_frame(requests, LARGEST_REQUEST_BYTES + 1)
        if request is None:
            return
        if request[:1] == PROBE:
            connection.sendall(frame(json.dumps(probe_worker(confinement, birth)).encode()))
            continue
        allow_cpu(timeout_seconds)
        connection.sendall(frame(handler(request[1:])))
        if handler.needs_replacement:
            return
