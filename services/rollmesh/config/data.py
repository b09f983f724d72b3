"""Data section: sources of prompts."""

import math
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from rollmesh.config.methods import check_plain
from rollmesh.config.section import Section


class SourceSection(Section):
    """Traits of a prompt source that other parts depend on; the defaults are those of a table without verifiers."""

    task_verifier: ClassVar[str] = ""
    """Verifier that scores every prompt of a generated task; empty for tables."""
    runs_user_code: ClassVar[bool] = False
    """True if opening the source imports code of the user."""
    has_rows: ClassVar[bool] = True
    """True if its prompts are rows of the user, which may name a domain."""
    type: str

    @property
    def table_path(self) -> str | None:
        """File that must exist at startup; None without one."""
        return getattr(self, "path", None)

    @property
    def rows_name_verifiers(self) -> bool:
        """True if a row may name its verifier: rows of a user's code always may."""
        return self.runs_user_code or bool(getattr(self, "verifier_field", None))


class CountdownSource(SourceSection):
    """Countdown search with digits and a target; the generated, endless demo task."""

    task_verifier = "countdown"
    has_rows = False
    type: Literal["countdown"] = "countdown"
    min_numbers: int = Field(default=5, ge=2, le=9)
    """Minimum number of distinct digits in a puzzle."""
    max_numbers: int = Field(default=8, ge=2, le=9)
    """Maximum number of distinct digits in a puzzle."""
    puzzles: int | None = Field(default=None, ge=1, le=1_048_576)
    """Puzzles of the training split, which come again every epoch; null for new ones without end."""


class JsonlSource(SourceSection):
    """JSON-lines file with the prompts and the inputs of the verifier, one object per line."""

    type: Literal["jsonl"] = "jsonl"
    path: str
    """File with one JSON object per line."""
    prompt_field: str = "prompt"
    """Field with the prompt text (or a list of chat messages). This and the other fields may be paths into nested
    fields, such as ``reward_model.ground_truth``."""
    answer_field: str | None = "answer"
    """Field with the reference answer, passed to the verifier as ``answer``; null without one."""
    verifier_field: str | None = None
    """Field that names the verifier per row; null uses reward.verifier for all rows."""
    chat: bool = False
    """Render prompts with the tokenizer's chat template."""


class ParquetSource(JsonlSource):
    """Parquet file with the fields of jsonl (extra: datasets)."""

    type: Literal["parquet"] = "parquet"  # type: ignore[assignment]
    path: str
    """Parquet file with one prompt per row; columns may be nested."""


class ReasoningGymSource(SourceSection):
    """A reasoning-gym task (extra: reward); scored by the task's own verifier."""

    task_verifier = "reasoning_gym"
    has_rows = False
    type: Literal["reasoning_gym"] = "reasoning_gym"
    task: str
    """Name of the reasoning-gym dataset, for example ``chain_sum``."""
    size: int = Field(default=10_000, ge=1)
    """Items per epoch."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of ``reasoning_gym.create_dataset``, except ``size``, which is the field above, and ``seed``,
    which follows from the seed of the run."""
    chat: bool = False
    """Render prompts with the tokenizer's chat template."""

    @field_validator("options")
    @classmethod
    def _options_leave_size_and_seed_to_the_run(cls, options: dict[str, Any]) -> dict[str, Any]:
        remedies = {"size": "data.source.size", "seed": "the seed of the run (seed)"}
        for name, remedy in remedies.items():
            if name in options:
                raise ValueError(f"{name}={options[name]!r} cannot be an option: leave it out and set {remedy}")
        return options


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


SingleSourceConfig = Annotated[
    CountdownSource | JsonlSource | ParquetSource | ReasoningGymSource | PythonSource, Field(discriminator="type")
]

SMALLEST_WEIGHT = 1e-4
_WEIGHT_TOLERANCE = 1e-6
DOMAIN_PATTERN = r"[\w.+-]{1,64}"
"""Name of a domain: it stands in records of the queue and in labels of metrics."""


class MixturePart(Section):
    """One domain of a mixture."""

    name: str = Field(pattern=f"^{DOMAIN_PATTERN}$")
    """Domain of the prompts of this part."""
    weight: float = Field(ge=SMALLEST_WEIGHT, le=1)
    """Share of the groups that get a prompt of this part, with ``curriculum.sampler: order``."""
    source: SingleSourceConfig
    """Prompts of this part."""


class MixtureSource(SourceSection):
    """Several sources, each a domain of its own."""

    has_rows = False
    type: Literal["mixture"] = "mixture"
    parts: list[MixturePart] = Field(min_length=1)
    """Sources with their names and weights; the weights sum to 1."""

    @model_validator(mode="after")
    def _the_parts_are_a_whole(self) -> Self:
        names = [part.name for part in self.parts]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"parts: the name {repeated[0]} comes more than once; a part is a domain of its own")
        if abs((total := math.fsum(part.weight for part in self.parts)) - 1) > _WEIGHT_TOLERANCE:
            raise ValueError(f"parts: the weights sum to {total:g}; they must sum to 1")
        return self


PromptSourceConfig = Annotated[
    CountdownSource | JsonlSource | ParquetSource | ReasoningGymSource | PythonSource | MixtureSource,
    Field(discriminator="type"),
]


def _plain_variables(variables: dict[str, Any]) -> dict[str, Any]:
    check_plain(variables, "chat_template_kwargs")
    return variables


TemplateVariables = Annotated[dict[str, Any], AfterValidator(_plain_variables)]
"""Variables for the tokenizer's chat template."""


class DataConfig(Section):
    """Prompts."""

    source: PromptSourceConfig = Field(default_factory=CountdownSource)
    """Training prompts."""
    evaluation_source: PromptSourceConfig | None = None
    """Evaluation prompts; null uses ``source``: new prompts of a generated task, held-out rows of a table."""
    domain_field: str | None = None
    """Field of the rows of a table that names the domain of the prompt; null without domains. The parts of a mixture
    are its domains."""
    held_out_ratio: float = Field(default=0.05, ge=0, lt=1)
    """Share of a table's distinct prompts that is excluded from training without ``evaluation_source``; 0 evaluates on
    the training rows."""
    shuffle: bool = True
    """Shuffle every epoch with the run's seed."""
    max_prompt_tokens: int = Field(default=1024, ge=1)
    """Maximum length of a prompt; a longer one is an error that names its row."""

    chat_template_kwargs: TemplateVariables = Field(default_factory=dict)
    """Variables for the tokenizer's chat template, for example {enable_thinking: false} of Qwen3, wherever it renders
    messages: prompts of all sources, and calls of the agents API, which can add to them or replace
    them. A template that prints today's date prints 26 July 2024, so that equal prompts stay equal."""

    @model_validator(mode="after")
    def _rows_have_the_domain_field(self) -> Self:
        if self.domain_field is not None and not self.source.has_rows:
            raise ValueError(
                f"domain_field={self.domain_field}: source.type={self.source.type} has no rows of yours; leave it out, "
                "or make each domain a part of source.type=mixture"
            )
        return self

    @property
    def domains(self) -> tuple[str, ...] | None:
        """Domains of the training prompts, one empty name without domains; None where the rows name them."""
        if isinstance(self.source, MixtureSource):
            return tuple(part.name for part in self.source.parts)
        return None if self.domain_field is not None else ("",)

    @property
    def sources(self) -> dict[str, SingleSourceConfig]:
        """Configured sources by their field, the parts of a mixture one by one."""
        found: dict[str, SingleSourceConfig] = {}
        for field, source in (("source", self.source), ("evaluation_source", self.evaluation_source)):
            if isinstance(source, MixtureSource):
                found |= {f"{field}.parts.{at}.source": part.source for at, part in enumerate(source.parts)}
            elif source is not None:
                found[field] = source
        return found
