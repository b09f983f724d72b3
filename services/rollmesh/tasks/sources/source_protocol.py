"""Protocol of prompt sources, and the settings that do not depend on the kind of source."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from rollmesh.text import Tokenizer
from rollmesh.types import Prompt

Split = Literal["train", "eval"]
"""Prompts for training, or prompts for evaluations; no prompt is in both."""


OnChecked = Callable[[int, int], None]
"""Callback while a source is opened: rows checked so far and rows in total. It may raise to stop the check."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSettings:
    """Settings of a source that do not depend on its kind."""

    tokenizer: Tokenizer
    seed: int
    split: Split
    shuffle: bool
    max_prompt_tokens: int
    held_out_ratio: float
    """Share of a table's distinct prompts in the eval split; 0 puts all rows into both splits."""
    keep_messages: bool
    """True to put the messages of chat prompts into their metadata, for agents that send them."""
    on_checked: OnChecked | None
    first_rows: int | None = None
    """Number of rows of a table that are read, for a trial; None for all rows."""


class PromptSource(Protocol):
    """Prompts by position: equal (epoch, index) give equal prompts in every process and after every restart.

    So the cursor is durable: two integers in the store give the position of the next prompt.
    """

    @property
    def epoch_size(self) -> int:
        """Number of prompts in one epoch; indices are in [0, epoch_size)."""

    def prompt(self, epoch: int, index: int) -> Prompt:
        """Return the prompt at a position.

        Raises DataError with the name of a row that gives no valid prompt, and IndexError outside the epoch.
        """
