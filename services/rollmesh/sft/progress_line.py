"""Progress of fine-tuning on a terminal, where one line changes, or in a log, which gets a line now and then."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TextIO

from rollmesh.sft.sft_trainer import SftStep

_LOG_SECONDS = 10.0


@dataclass(slots=True)
class ProgressLine:
    """Lines of one process; silent without a stream."""

    _stream: TextIO | None
    _open: bool = field(default=False, init=False)
    _written: float = field(default=-_LOG_SECONDS, init=False)

    def note(self, text: str) -> None:
        """Write a line that stays."""
        if self._stream is not None:
            print("\n" * self._open + text, file=self._stream, flush=True)
        self._open = False

    def step(self, done: SftStep, train_steps: int) -> None:
        """Show a train step: in place on a terminal, else the first, the last, and one every few seconds."""
        if self._stream is None:
            return
        speed = done.forward_tokens / done.seconds
        text = (
            f"step {done.train_step}/{train_steps}  loss {done.loss:.4f}  rate {done.learning_rate:.2e}  "
            f"gradient {done.grad_norm:.3f}  {speed:,.0f} tokens/s"
        )
        if self._stream.isatty():
            print(f"\r\x1b[K{text}", end="", file=self._stream, flush=True)
            self._open = True
        elif done.train_step == train_steps or time.monotonic() - self._written >= _LOG_SECONDS:
            self._written = time.monotonic()
            self.note(text)
