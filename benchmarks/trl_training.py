"""Trainings as a user of TRL writes them: ``python -P trl_training.py JOBS``, in an environment of its own.

JOBS is a JSON file with one object for each training, in turn: ``model`` (folder), ``data`` (file of rows), ``steps``,
``learning_rate`` and ``history``, the file to write with an object for each step. With ``batch_rows`` and ``chat`` it
is supervised fine-tuning on rows with prompt and response, or messages: the loss, and the CPU seconds of the process at
the end of the step. Else it is GRPO on the demo's task with the settings of ``recipes/countdown/demo.yaml``, with TRL's
own log; under torchrun each process has its share of the batch. Float32, AdamW.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from datasets import load_dataset
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from rollmesh.recipes.countdown.starter.countdown_reward import reward


def arguments_of(job: dict[str, Any]) -> dict[str, Any]:
    """Return what both kinds of training are configured with."""
    return {
        "output_dir": str(Path(job["history"]).parent),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
        "disable_tqdm": True,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "max_steps": job["steps"],
        "learning_rate": job["learning_rate"],
        "lr_scheduler_type": "constant",
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
    }


class StepTimes(TrainerCallback):
    """CPU seconds at the end of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Note the time."""
        self.seconds.append(time.process_time())


def fine_tune(job: dict[str, Any], rows: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    """Train on answers, and write the losses and times."""
    times = StepTimes()
    trainer = SFTTrainer(
        model=job["model"],
        processing_class=tokenizer,
        train_dataset=rows if job["chat"] else rows.rename_column("response", "completion"),
        callbacks=[times],
        args=SFTConfig(
            **arguments_of(job),
            per_device_train_batch_size=job["batch_rows"],
            train_sampling_strategy="sequential",
            max_length=None,
            assistant_only_loss=job["chat"],
            weight_decay=0.0,
            max_grad_norm=1.0,
        ),
    )
    trainer.train()
    losses = [step["loss"] for step in trainer.state.log_history if "loss" in step]
    steps = [{"loss": loss, "cpu_seconds": at} for loss, at in zip(losses, times.seconds, strict=True)]
    Path(job["history"]).write_text(json.dumps(steps))


def reinforce(job: dict[str, Any], rows: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    """Train on rewards, and write the log."""
    tokenizer.eos_token = "!"  # the other end, "?", is in the model's generation_config.json

    def score(completion_ids: list[list[int]], numbers: list[list[int]], answer: list[int], **_: Any) -> list[float]:
        answers = zip(tokenizer.batch_decode(completion_ids), numbers, answer, strict=True)
        return [reward(text, {"numbers": digits, "answer": target}) for text, digits, target in answers]

    trainer = GRPOTrainer(
        model=job["model"],
        reward_funcs=score,
        processing_class=tokenizer,
        train_dataset=rows,
        args=GRPOConfig(
            **arguments_of(job),
            per_device_train_batch_size=128 // int(os.environ.get("WORLD_SIZE", "1")),
            num_generations=8,
            max_completion_length=512,
            temperature=1.0,
            epsilon=0.2,
            epsilon_high=0.28,
        ),
    )
    trainer.train()
    if trainer.is_world_process_zero():
        Path(job["history"]).write_text(json.dumps(trainer.state.log_history))


for each in json.loads(Path(sys.argv[1]).read_text()):
    train = fine_tune if "batch_rows" in each else reinforce
    train(
        each,
        load_dataset("json", data_files=each["data"], split="train"),
        PreTrainedTokenizerFast.from_pretrained(each["model"]),
    )
