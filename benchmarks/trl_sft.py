"""Supervised fine-tuning by TRL, as a user would write it: ``python trl_sft.py JOBS``, in an environment of its own.

JOBS is a JSON file with one object for each training, in turn: ``model`` (folder), ``data`` (rows with prompt and
response, or messages), ``chat``, ``batch_rows``, ``steps``, ``learning_rate`` and ``history``, the file to write with
an object for each step: its loss, and the CPU seconds of the process at its end. Float32, AdamW, one process.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from datasets import load_dataset
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer


class StepTimes(TrainerCallback):
    """CPU seconds at the end of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Note the time."""
        self.seconds.append(time.process_time())


def train(job: dict[str, Any]) -> None:
    """Train as one job says, and write its history."""
    rows = load_dataset("json", data_files=job["data"], split="train")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(job["model"])
    times = StepTimes()
    trainer = SFTTrainer(
        model=job["model"],
        processing_class=tokenizer,
        train_dataset=rows if job["chat"] else rows.rename_column("response", "completion"),
        callbacks=[times],
        args=SFTConfig(
            output_dir=str(Path(job["history"]).parent),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            dataloader_pin_memory=False,
            disable_tqdm=True,
            report_to="none",
            save_strategy="no",
            logging_steps=1,
            max_steps=job["steps"],
            per_device_train_batch_size=job["batch_rows"],
            train_sampling_strategy="sequential",
            max_length=None,
            assistant_only_loss=job["chat"],
            learning_rate=job["learning_rate"],
            lr_scheduler_type="constant",
            adam_beta1=0.9,
            adam_beta2=0.95,
            weight_decay=0.0,
            max_grad_norm=1.0,
        ),
    )
    trainer.train()
    losses = [step["loss"] for step in trainer.state.log_history if "loss" in step]
    steps = [{"loss": loss, "cpu_seconds": at} for loss, at in zip(losses, times.seconds, strict=True)]
    Path(job["history"]).write_text(json.dumps(steps))


for each in json.loads(Path(sys.argv[1]).read_text()):
    train(each)
