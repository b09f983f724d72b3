"""The trained model of a fine-tuning run: a Hugging Face folder with a model card."""

import hashlib
from pathlib import Path

import torch

from rollmesh.checkpoints.durable import remove_tree, sync_tree
from rollmesh.config.load import run_file_text
from rollmesh.config.sft_config import SftConfig
from rollmesh.file_writes import write_text
from rollmesh.trainer.learner.policy_learner import PolicyLearner
from rollmesh.trainer.learner.policy_scorer import write_merged

MODEL_FOLDER = "model"
CARD_FILE = "README.md"
_WRITING = ".model-being-written"


def write_trained_model(
    config: SftConfig, learner: PolicyLearner, train_steps: int, evaluation_loss: float | None
) -> Path:
    """Write the model to the run folder, in place of an earlier one; an adapter is merged into its base.

    Every rank must call it. A process that is killed leaves the earlier model, or none, and its next start writes it.
    """
    folder = Path(config.folder)
    target, work = folder / MODEL_FOLDER, folder / _WRITING
    copied = learner.output.copy_out()
    if not learner.compute.world.leads:
        return target
    remove_tree(work)
    written = work / MODEL_FOLDER
    if learner.model.adapter is None:
        copied.write(written)
    else:
        copied.write(work / "adapter")
        write_merged(work / "adapter", learner.source, written, getattr(torch, config.model.dtype))
    write_text(written / CARD_FILE, _card(config, train_steps, evaluation_loss))
    sync_tree(written)
    if target.exists():
        target.rename(work / "earlier")
    written.rename(target)
    remove_tree(work)
    return target


_HEADER = """---
library_name: transformers
pipeline_tag: text-generation
tags: [supervised-fine-tuning, rollmesh]
---
"""


def _card(config: SftConfig, train_steps: int, evaluation_loss: float | None) -> str:
    rows = {
        "Train step": f"{train_steps}",
        "Initial model": f"`{config.model.path}`",
        "Rows": ", ".join(f"`{file}`" for file in config.data.train),
        "Loss of held-out rows": "not measured" if evaluation_loss is None else f"{evaluation_loss:.4f} nats per token",
        "Digest of the resolved run file": f"sha256 `{hashlib.sha256(run_file_text(config).encode()).hexdigest()}`",
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return f"{_HEADER}\n# {config.name}\n\n| | |\n|---|---|\n{table}\n"
