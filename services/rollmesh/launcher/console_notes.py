"""Notes on the console: addresses of the services, what they wait for, and a run that learns nothing."""

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rollmesh.checkpoints.sealing import page_link
from rollmesh.config import RunConfig
from rollmesh.launcher.supervisor import Supervisor
from rollmesh.runtime.endpoints import ServiceStates, read_endpoints
from rollmesh.runtime.health import Waits, waits_text
from rollmesh.runtime.tasks import cancel_and_wait

_LABELS = {"gateway": "the run as a page", "agents": "the OpenAI-compatible API"}
_LOST = {"gateway": "its page", "agents": "the OpenAI-compatible API"}
_POLL_SECONDS = 1.0
_NUMBER = re.compile(r"\d+")
_STEPS = 5
"""Train steps after which a note is due; all of a shorter run."""
_EQUAL_GROUPS = 20
_NOTES = {
    "reward": (
        "hint: the reward was 0 in each of the first {steps} train steps, so the policy learns nothing: score an "
        "answer of samples.jsonl with the verifier by hand; if it is right to give 0, the task is too hard for this "
        "model, or the prompt does not ask for the form that the verifier reads"
    ),
    "truncated": (
        "hint: every answer of the first {steps} train steps was cut off at rollout.max_new_tokens: raise it, or check "
        "that the model ends its answers (eos_token_id, data.source.chat)"
    ),
}


class AddressNotes:
    """One console note for each address, and one when the launcher stops restarting a service that has an address."""

    def __init__(self, config: RunConfig, folder: Path, supervisor: Supervisor, note: Callable[[str], None]) -> None:
        self._config = config
        self._folder = folder
        self._supervisor = supervisor
        self._note = note
        self._noted: set[str] = set()

    def update(self) -> None:
        """Read the addresses once and note each new one, such as another port after a restart."""
        for endpoint in read_endpoints(self._folder):
            if endpoint.service in _LABELS:
                # Console notes are often kept in logs: a token of the operator's own is not written there.
                is_linked = endpoint.service == "gateway" and self._config.gateway.token is None
                address = page_link(self._config, endpoint.url) if is_linked else endpoint.url
                self._once(f"{_LABELS[endpoint.service]}: {address}")
        for name, reason in self._supervisor.given_up.items():
            self._once(f"the run continues without {_LOST[name.rpartition('-')[0]]}: {reason}")

    def _once(self, line: str) -> None:
        if line not in self._noted:
            self._noted.add(line)
            self._note(line)


class ServiceWatch:
    """Poller of ``/readyz`` of all services; notes each wait of a service, and of the launcher itself, once."""

    def __init__(self, states: ServiceStates, note: Callable[[str], None]) -> None:
        self._states = states
        self._note = note
        self.own = Waits()
        """What the launcher itself waits for."""
        self.supervisor: Supervisor | None = None
        """Supervisor of the services, once they are there."""
        self._noted: set[str] = set()
        self._last: set[str] = set()

    def text(self) -> str:
        """Return the waits of the services on one line; empty without one."""
        return waits_text(self._states.waits)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Poll within the block."""
        polling = asyncio.create_task(self._poll(), name="watch-services")
        try:
            yield
        finally:
            await cancel_and_wait(polling)

    async def _poll(self) -> None:
        before = time.monotonic()
        while True:
            await self._states.read()
            now = time.monotonic()
            if self.supervisor is not None:
                self.supervisor.count_service(self._states.ready, now - before)
            before = now
            self.note_new()
            await asyncio.sleep(_POLL_SECONDS)

    def note_new(self) -> None:
        """Note the reasons that two polls in a row have seen; one that has ended is noted again when it returns."""
        # Numbers differ from one attempt to the next, and so do the services that meet a failure at one moment.
        lines = {_NUMBER.sub("#", reason): f"waiting: {self.text()}" for reason in self._states.waits.values()}
        if own := self.own.text():
            lines[f"launcher: {_NUMBER.sub('#', own)}"] = f"waiting for {own}"
        seen = lines.keys() & self._last
        for line in sorted({lines[key] for key in seen - self._noted}):
            self._note(line)
        self._noted = (self._noted & lines.keys()) | seen
        self._last = set(lines)


class RewardNotes:
    """Reader of the step reports of one session; each note is due once, at its first steps."""

    def __init__(self, train_steps: int) -> None:
        self._due = min(_STEPS, train_steps)
        self._seen = 0
        self._left = set(_NOTES)
        self._noted_equal = False

    def equal(self, groups_in_a_row: int) -> Iterator[str]:
        """Yield the note on groups that are left out because all their answers have the same reward, once."""
        if groups_in_a_row >= _EQUAL_GROUPS and not self._noted_equal:
            self._noted_equal = True
            yield (
                f"hint: {groups_in_a_row} groups in a row had equal rewards for all their answers, all right or all "
                "wrong, and are not trained on; schedule.max_filtered_in_a_row of them end the run: try the verifier "
                "on an answer by hand, or choose easier, or harder, prompts"
            )

    def read(self, report: Mapping[str, Any]) -> Iterator[str]:
        """Yield the notes that are due after this report."""
        if "reward_mean" not in report or self._seen >= self._due:
            return
        self._seen += 1
        if report["reward_mean"] != 0:
            self._left.discard("reward")
        batch = report.get("batch")
        if not isinstance(batch, Mapping) or batch.get("truncated_share") != 1:
            self._left.discard("truncated")
        if self._seen == self._due:
            yield from (_NOTES[name].format(steps=self._due) for name in sorted(self._left))
