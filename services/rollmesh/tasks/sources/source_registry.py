"""Registry of prompt sources: one entry per ``type`` of a source; ``config.data`` declares its fields and traits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rollmesh.config.data import DataConfig
from rollmesh.tasks.sources.countdown import open_countdown
from rollmesh.tasks.sources.jsonl import open_jsonl
from rollmesh.tasks.sources.parquet import open_parquet
from rollmesh.tasks.sources.python import open_python
from rollmesh.tasks.sources.reasoning_gym import ReasoningGymPrompts
from rollmesh.tasks.sources.source_protocol import OnChecked, PromptSource, SourceSettings, Split
from rollmesh.text import Tokenizer

SOURCES: Mapping[str, Callable[[Any, SourceSettings], PromptSource]] = {
    "countdown": open_countdown,
    "jsonl": open_jsonl,
    "parquet": open_parquet,
    "reasoning_gym": ReasoningGymPrompts,
    "python": open_python,
}
"""Functions of (section of the source, settings) that open a source, by its ``type``."""


def build_prompt_source(
    config: DataConfig,
    tokenizer: Tokenizer,
    seed: int,
    split: Split = "train",
    *,
    keep_messages: bool = False,
    on_checked: OnChecked | None = None,
    first_rows: int | None = None,
) -> PromptSource:
    """Open the prompts of one split.

    The eval split is read from ``evaluation_source`` if it is set. Otherwise generated tasks create new prompts, and
    tables hold rows out. ``first_rows`` limits a table, for a trial. Raises DataError for the first bad row and
    ConfigError for an invalid source.
    """
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
        first_rows=first_rows,
    )
    return SOURCES[source.type](source, settings)
