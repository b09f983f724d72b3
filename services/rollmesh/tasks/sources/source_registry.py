"""Registry of prompt sources: one entry per ``type`` of a source; ``config.data`` declares its fields and traits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rollmesh.config.data import DataConfig, MixtureSource
from rollmesh.tasks.sources.countdown import open_countdown
from rollmesh.tasks.sources.jsonl import open_jsonl
from rollmesh.tasks.sources.mixture import MixturePrompts, OpenPart
from rollmesh.tasks.sources.parquet import open_parquet
from rollmesh.tasks.sources.python import open_python
from rollmesh.tasks.sources.reasoning_gym import ReasoningGymPrompts
from rollmesh.tasks.sources.source_protocol import OnChecked, RowSource, SourceSettings, Split
from rollmesh.text import Tokenizer


def _open_mixture(source: MixtureSource, settings: SourceSettings) -> MixturePrompts:
    parts = [
        OpenPart(name=part.name, weight=part.weight, source=SOURCES[part.source.type](part.source, settings))
        for part in source.parts
    ]
    return MixturePrompts(parts, settings.split)


SOURCES: Mapping[str, Callable[[Any, SourceSettings], RowSource]] = {
    "countdown": open_countdown,
    "jsonl": open_jsonl,
    "parquet": open_parquet,
    "reasoning_gym": ReasoningGymPrompts,
    "python": open_python,
    "mixture": _open_mixture,
}
"""Functions of (section of the source, settings) that open a source, by its ``type``."""
_WITHOUT_ROWS = ("countdown", "reasoning_gym", "mixture")
"""Sources without rows of the user; an evaluation source may be one of them beside a table with domains."""


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
        domain_field=None if source.type in _WITHOUT_ROWS else config.domain_field,
    )
    return SOURCES[source.type](source, settings)
