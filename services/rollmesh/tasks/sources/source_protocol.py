"""Protocol of prompt sources, and the sources of a run file."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal, Protocol

from rollmesh.config.data import DataConfig, SourceSection
from rollmesh.text import Tokenizer
from rollmesh.types import Prompt

Split = Literal["train", "eval"]
"""Prompts for training, or prompts for evaluations; no prompt is in both."""


OnChecked = Callable[[int, int], None]
"""Callback while a source is opened: rows checked so far and rows in total. It may raise to stop the check."""
SOURCES: Mapping[str, str] = {
    "countdown": "countdown:CountdownPrompts",
    "jsonl": "sources.tables:open_table",
    "parquet": "sources.tables:open_table",
    "reasoning_gym": "reasoning_gym:ReasoningGymPrompts",
    "python": "sources.tables:open_python",
    "mixture": "sources.derived:MixturePrompts",
}
"""``module:function`` of (section of the source, settings) by the ``type`` of the section, below ``rollmesh.tasks``.

``config.data`` declares the fields and traits of each section.
"""


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
    domain_field: str | None = None
    """Field of a row with the domain of its prompt; None without domains."""
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the chat template."""
    first_rows: int | None = None
    """Number of rows of a table that are read, for a trial; None for all rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRows:
    """Rows that a sampler chooses from; one value per row."""

    names: Sequence[str]
    """Name of the record in the prompt history; the id of the prompt, unless the row is endless."""
    domains: Sequence[str]
    """Domain of the prompt; empty without domains."""
    endless: Sequence[bool]
    """True for a row that gives a new prompt at every draw."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Weight of every domain of a mixture; empty for other sources."""


class PromptSource(Protocol):
    """Prompts by position: equal (epoch, index) give equal prompts in every process and after every restart.

    So the cursor is durable: two integers in the store give the position of the next prompt.
    """

    @property
    def epoch_size(self) -> int:
        """Number of prompts in one epoch; indices are in [0, epoch_size)."""

    @property
    def content(self) -> str:
        """Number and digest of the rows that the settings only point to; empty for prompts from the settings alone."""

    def prompt(self, epoch: int, index: int) -> Prompt:
        """Return the prompt at a position.

        Raises DataError with the name of a row that gives no valid prompt, and IndexError outside the epoch.
        """


class RowSource(PromptSource, Protocol):
    """Prompts that a sampler may choose by their row."""

    def rows(self) -> SourceRows:
        """Return the rows; no prompt is read for it."""

    def drawn(self, row: int, epoch: int, index: int) -> Prompt:
        """Return the prompt of a row for the draw at (epoch, index), which matters for an endless row only.

        Raises DataError as ``prompt`` does.
        """


def open_source(source: SourceSection, settings: SourceSettings) -> RowSource:
    """Open the prompts of one section."""
    module_name, _, function_name = SOURCES[source.type].partition(":")
    opened: RowSource = getattr(import_module(f"rollmesh.tasks.{module_name}"), function_name)(source, settings)
    return opened


def build_prompt_source(
    config: DataConfig,
    tokenizer: Tokenizer,
    seed: int,
    split: Split = "train",
    *,
    keep_messages: bool = False,
    on_checked: OnChecked | None = None,
    first_rows: int | None = None,
) -> RowSource:
    """Open the prompts of one split.

    The eval split is read from ``evaluation_source`` if it is set. Otherwise generated tasks create new prompts, and
    tables hold rows out. ``first_rows`` limits a table, for a trial. Raises DataError for the first bad row and
    ConfigError for an invalid source.
    """
    tokenizer.check_template_variables(config.chat_template_kwargs, "data.chat_template_kwargs")
    source = config.evaluation_source if split == "eval" and config.evaluation_source is not None else config.source
    settings = SourceSettings(
        tokenizer=tokenizer,
        seed=seed,
        split=split,
        shuffle=config.shuffle,
        max_prompt_tokens=config.max_prompt_tokens,
        held_out_ratio=config.held_out_ratio if config.evaluation_source is None else 0.0,
        keep_messages=keep_messages,
        on_checked=on_checked,
        template_variables=config.chat_template_kwargs,
        first_rows=first_rows,
        domain_field=config.domain_field if source.has_rows else None,
    )
    return open_source(source, settings)
