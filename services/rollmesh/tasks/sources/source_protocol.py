"""What a prompt source is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

from rollmesh.types import Prompt

Split = Literal["train", "eval"]
"""Training prompts, or the ones evaluations use; no prompt is in both."""


OnChecked = Callable[[int, int], None]
"""Called while a source is opened, with the rows checked so far and the rows there are; it may raise to stop that."""


class PromptSource(Protocol):
    """Prompts by position: the same (epoch, index) is the same prompt in every process and after every restart.

    That makes the cursor durable: two integers in the store say what comes next.
    """

    @property
    def epoch_size(self) -> int:
        """Prompts of one epoch; indices are in [0, epoch_size)."""

    def prompt(self, epoch: int, index: int) -> Prompt:
        """The prompt at a position.

        Raises DataError naming the row when it makes no prompt, IndexError outside the epoch.
        """
