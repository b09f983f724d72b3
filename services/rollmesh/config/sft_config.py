"""The run file of supervised fine-tuning (``rollmesh sft``)."""

from typing import Literal, Self

from pydantic import Field, model_validator

from rollmesh.config.data import TemplateVariables
from rollmesh.config.model import ModelConfig
from rollmesh.config.section import Section
from rollmesh.config.trainer import OptimizationConfig

SFT_FILE = "sft.yaml"
"""Name of the resolved run file in its run folder."""


class RowOptions(Section):
    """Fields of a row: those of a prompt and a response, or messages."""

    prompt_field: str = Field(default="prompt", min_length=1)
    """Field with the text of the prompt, which is not trained on."""
    response_field: str = Field(default="response", min_length=1)
    """Field with the text that is trained on."""
    messages_field: str = Field(default="messages", min_length=1)
    """Field with the messages of a chat; a row that has it is a chat. The assistant's messages are trained on."""
    tools_field: str = Field(default="tools", min_length=1)
    """Field with the tools of a chat in OpenAI's format, or their JSON text; a row may lack it."""
    chat_template_kwargs: TemplateVariables = Field(default_factory=dict)
    """Variables for the tokenizer's chat template, as data.chat_template_kwargs of a run."""
    too_long: Literal["error", "drop"] = "error"
    """A row longer than ``max_tokens`` is an error, or dropped and counted."""


class SftDataConfig(RowOptions):
    """Rows, and the form that all of them have."""

    train: tuple[str, ...] = Field(min_length=1)
    """JSONL or Parquet files whose rows are trained on."""
    evaluation: tuple[str, ...] = ()
    """Files with held-out rows, whose loss is computed before, during and after training; none without any."""
    shuffle: bool = True
    """Shuffle the rows in every epoch, by the run's seed; false trains on them in the order of the files."""
    max_tokens: int | None = Field(default=None, ge=2)
    """Longest row (``too_long``); null for the model's max_position_embeddings."""


class SftTrainerConfig(OptimizationConfig):
    """Optimization. The loss is the mean cross-entropy of the target tokens of a batch."""

    learning_rate: float = Field(default=2e-5, gt=0)
    """Peak learning rate. A change in a continued run applies to the steps after its newest state."""
    epochs: int | None = Field(default=None, ge=1)
    """Passes over the rows; null for one, unless ``train_steps`` is set. The last batch of an epoch has the rest."""
    train_steps: int | None = Field(default=None, ge=1)
    """Number of batches to train on, in place of ``epochs``."""
    batch_rows: int = Field(default=32, ge=1)
    """Rows of a batch, over all processes, for one update."""
    evaluation_every_steps: int = Field(default=100, ge=1)
    """Train steps between two evaluations; there is one before the first step and one after the last."""
    state_every_steps: int = Field(default=100, ge=1)
    """Train steps between two saved states, from which a stopped or killed run continues; one follows the last step."""

    @model_validator(mode="after")
    def _has_one_length(self) -> Self:
        if self.epochs is not None and self.train_steps is not None:
            raise ValueError(f"epochs={self.epochs} with train_steps={self.train_steps}: set one of them")
        return self


class SftLauncherConfig(Section):
    """Processes on this machine."""

    trainer_processes: int = Field(default=1, ge=1)
    """Number of ranks; more than one starts torchrun with FSDP2."""
    torch_threads: int | None = Field(default=None, ge=1, le=1024)
    """Threads per process; null divides the cores among the processes."""


class SftConfig(Section):
    """Supervised fine-tuning of one model."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")
    """Name of the run, for its model card."""
    folder: str
    """Run folder: config, metrics, saved states, and the trained model in ``model``, a ``model.path`` of other runs."""
    seed: int = 0
    """Seed of the order of the rows and of dropout."""
    model: ModelConfig
    """The model before training."""
    data: SftDataConfig
    """Rows."""
    trainer: SftTrainerConfig = Field(default_factory=SftTrainerConfig)
    """Optimization."""
    launcher: SftLauncherConfig = Field(default_factory=SftLauncherConfig)
    """Processes on this machine."""
