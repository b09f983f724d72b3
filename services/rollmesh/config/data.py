"""Data section: sources of prompts."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from rollmesh.config.section import Section


class SourceSection(Section):
    """Traits of a prompt source that other parts depend on; the defaults are those of a table without verifiers."""

    task_verifier: ClassVar[str] = ""
    """Verifier that scores every prompt of a generated task; empty for tables."""
    runs_user_code: ClassVar[bool] = False
    """True if opening the source imports code of the user."""

    @property
    def table_path(self) -> str | None:
        """File that must exist at startup; None without one."""
        return None

    @property
    def rows_name_verifiers(self) -> bool:
        """True if a row may name its verifier."""
        return False


class CountdownSource(SourceSection):
    """Countdown search with digits and a target; the generated, endless demo task."""

    task_verifier = "countdown"
    type: Literal["countdown"] = "countdown"
    min_numbers: int = Field(default=5, ge=2, le=9)
    """Minimum number of distinct digits in a puzzle."""
    max_numbers: int = Field(default=8, ge=2, le=9)
    """Maximum number of distinct digits in a puzzle."""


class JsonlSource(SourceSection):
    """JSON-lines file with the prompts and the inputs of the verifier, one object per line."""

    type: Literal["jsonl"] = "jsonl"
    path: str
    """File with one JSON object per line."""
    prompt_field: str = "prompt"
    """Field with the prompt text (or a list of chat messages)."""
    answer_field: str | None = "answer"
    """Field with the reference answer, passed to the verifier as ``answer``; null without one."""
    verifier_field: str | None = None
    """Field that names the verifier per row; null uses reward.verifier for all rows."""
    chat: bool = False
    """Render prompts with the tokenizer's chat template."""

    @property
    def table_path(self) -> str:
        """File that must exist at startup."""
        return self.path

    @property
    def rows_name_verifiers(self) -> bool:
        """True if a row may name its verifier."""
        return bool(self.verifier_field)


class ParquetSource(JsonlSource):
    """Parquet file with the fields of jsonl (extra: datasets)."""

    type: Literal["parquet"] = "parquet"  # type: ignore[assignment]


class ReasoningGymSource(SourceSection):
    """A reasoning-gym task (extra: reward); scored by the task's own verifier."""

    task_verifier = "reasoning_gym"
    type: Literal["reasoning_gym"] = "reasoning_gym"
    task: str
    """Name of the reasoning-gym dataset, for example ``chain_sum``."""
    size: int = Field(default=10_000, ge=1)
    """Items per epoch."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of ``reasoning_gym.create_dataset``."""
    chat: bool = False
    """Render prompts with the tokenizer's chat template."""


class PythonSource(SourceSection):
    """A callable ``module:function`` returning a sequence of {"prompt": ..., "answer": ...} rows."""

    runs_user_code = True
    type: Literal["python"] = "python"
    target: str = Field(pattern=r"^[\w.]+:\w+$")
    """Callable ``module:function``, called with ``options`` as keyword arguments."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the callable."""
    chat: bool = False
    """Render prompts with the tokenizer's chat template."""

    @property
    def rows_name_verifiers(self) -> bool:
        """True, because any row may have the field ``verifier``."""
        return True


PromptSourceConfig = Annotated[
    CountdownSource | JsonlSource | ParquetSource | ReasoningGymSource | PythonSource, Field(discriminator="type")
]


class DataConfig(Section):
    """Prompts."""

    source: PromptSourceConfig = Field(default_factory=CountdownSource)
    """Training prompts."""
    evaluation_source: PromptSourceConfig | None = None
    """Evaluation prompts; null uses ``source``: new prompts of a generated task, held-out rows of a table."""
    held_out_ratio: float = Field(default=0.05, ge=0, lt=1)
    """Share of a table's distinct prompts that is excluded from training without ``evaluation_source``; 0 evaluates on
    the training rows."""
    shuffle: bool = True
    """Shuffle every epoch with the run's seed."""
    max_prompt_tokens: int = Field(default=1024, ge=1)
    """Maximum length of a prompt; a longer one is an error that names its row."""

    @property
    def sources(self) -> dict[str, PromptSourceConfig]:
        """Configured sources by their field."""
        fields = {"source": self.source, "evaluation_source": self.evaluation_source}
        return {field: source for field, source in fields.items() if source is not None}
