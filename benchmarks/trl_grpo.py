"""The demo's training as a user of TRL writes it; for an environment with TRL, and without rollmesh's own packages.

    PYTHONPATH=services python -P benchmarks/trl_grpo.py --model FOLDER --data ROWS.jsonl --updates N --history FILE

Under torchrun each process has its share of the batch. Settings are those of ``recipes/countdown/demo.yaml``.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from datasets import load_dataset
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from rollmesh.recipes.countdown.starter.countdown_reward import reward

parser = argparse.ArgumentParser()
for name, kind in (("--model", str), ("--data", str), ("--updates", int), ("--history", Path)):
    parser.add_argument(name, type=kind, required=True)
arguments = parser.parse_args()

tokenizer = PreTrainedTokenizerFast.from_pretrained(arguments.model)
tokenizer.eos_token = "!"  # the other end, "?", is in the model's generation_config.json


def score(completion_ids: list[list[int]], numbers: list[list[int]], answer: list[int], **_: Any) -> list[float]:
    """Score the answers of a batch."""
    rows = zip(tokenizer.batch_decode(completion_ids), numbers, answer, strict=True)
    return [reward(text, {"numbers": digits, "answer": target}) for text, digits, target in rows]


trainer = GRPOTrainer(
    model=arguments.model,
    reward_funcs=score,
    processing_class=tokenizer,
    train_dataset=load_dataset("json", data_files=arguments.data, split="train"),
    args=GRPOConfig(
        output_dir=str(arguments.history.parent),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        disable_tqdm=True,
        save_strategy="no",
        logging_steps=1,
        max_steps=arguments.updates,
        per_device_train_batch_size=128 // int(os.environ.get("WORLD_SIZE", "1")),
        num_generations=8,
        max_completion_length=512,
        temperature=1.0,
        learning_rate=4e-4,
        lr_scheduler_type="constant",
        adam_beta1=0.9,
        adam_beta2=0.95,
        epsilon=0.2,
        epsilon_high=0.28,
    ),
)
trainer.train()
if trainer.is_world_process_zero():
    arguments.history.write_text(json.dumps(trainer.state.log_history))
