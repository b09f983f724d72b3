"""Factory for the prompt source that a run file names."""

from __future__ import annotations

from dataclasses import replace

from rollmesh.config.data import (
    CountdownSource,
    DataConfig,
    JsonlSource,
    ParquetSource,
    PromptSourceConfig,
    PythonSource,
    ReasoningGymSource,
)
from rollmesh.tasks.sources.countdown import CountdownPrompts
from rollmesh.tasks.sources.jsonl import JsonlRows
from rollmesh.tasks.sources.parquet import ParquetRows
from rollmesh.tasks.sources.python import PythonRows
from rollmesh.tasks.sources.reasoning_gym import ReasoningGymPrompts
from rollmesh.tasks.sources.row import RowFormat
from rollmesh.tasks.sources.rows import RowPrompts, RowReader
from rollmesh.tasks.sources.source_protocol import OnChecked, PromptSource, Split
from rollmesh.text import Tokenizer


def build_prompt_source(
    config: DataConfig,
    tokenizer: Tokenizer,
    seed: int,
    split: Split = "train",
    *,
    keep_messages: bool = False,
    on_checked: OnChecked | None = None,
) -> PromptSource:
    """Open the prompts of one split; ``keep_messages`` puts the messages of chat prompts into their metadata.

    ``on_checked`` receives the number of checked rows of a table.

    The eval split is read from ``evaluation_source`` if it is set. Otherwise generated tasks create new prompts, and
    tables hold rows out. Raises DataError for the first bad row and ConfigError for an invalid source.
    """
    has_evaluation_source = config.evaluation_source is not None
    source = config.evaluation_source if split == "eval" and config.evaluation_source is not None else config.source
    if isinstance(source, CountdownSource):
        return CountdownPrompts(
            lambda text: tokenizer.encode(text).tolist(),
            seed=seed,
            split=split,
            min_numbers=source.min_numbers,
            max_numbers=source.max_numbers,
        )
    if isinstance(source, ReasoningGymSource):
        form = RowFormat(
            answer_field=None,
            verifier_field="verifier",
            chat=source.chat,
            keep_messages=keep_messages,
            max_prompt_tokens=config.max_prompt_tokens,
        )
        return ReasoningGymPrompts(
            source.task,
            source.options,
            form,
            tokenizer,
            size=source.size,
            seed=seed,
            split=split,
            shuffle=config.shuffle,
        )
    reader, form = _table(source, config.max_prompt_tokens)
    return RowPrompts(
        reader,
        replace(form, keep_messages=keep_messages),
        tokenizer,
        seed=seed,
        split=split,
        shuffle=config.shuffle,
        held_out_ratio=0.0 if has_evaluation_source else config.held_out_ratio,
        on_checked=on_checked,
    )


def _table(source: PromptSourceConfig, max_prompt_tokens: int) -> tuple[RowReader, RowFormat]:
    if isinstance(source, PythonSource):
        form = RowFormat(
            answer_required=False,
            verifier_field="verifier",
            verifier_required=False,
            chat=source.chat,
            max_prompt_tokens=max_prompt_tokens,
        )
        return PythonRows(source.target, source.options), form
    assert isinstance(source, JsonlSource)  # also true of ParquetSource, a subclass
    form = RowFormat(
        prompt_field=source.prompt_field,
        answer_field=source.answer_field,
        verifier_field=source.verifier_field,
        chat=source.chat,
        max_prompt_tokens=max_prompt_tokens,
    )
    is_parquet = isinstance(source, ParquetSource)
    return ParquetRows(source.path) if is_parquet else JsonlRows(source.path), form
