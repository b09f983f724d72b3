"""Training of the countdown model's warm start: ``python -m rollmesh.recipes.countdown.warm_start --out DIR``.

Supervised training on demonstrations from random weights, about 100 CPU seconds with one thread. All randomness is
seeded; the committed ``model/`` folder is the output of this script (measurements: MODEL.md).
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from rollmesh.recipes.countdown.demonstrations import SearcherMix, draw_demonstration
from rollmesh.recipes.countdown.tokenizer import (
    PAD,
    VOCABULARY,
    VOCABULARY_SIZE,
    save_tokenizer,
    stop_token_ids,
)

PAD_ID = VOCABULARY.index(PAD)
_IGNORED_LABEL = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStartSettings:
    """Settings that determine the weights."""

    seed: int = 11
    steps: int = 1400
    """Number of optimizer steps, one batch each."""
    tokens_per_batch: int = 2048
    """Padded tokens of one batch."""
    pool: int = 1024
    """Demonstrations drawn at a time and sorted by length, to limit the padding of batches."""
    matrix_learning_rate: float = 6e-3
    """Peak learning rate of Muon, for the matrices of the blocks: linear warm-up, then cosine to zero."""
    other_learning_rate: float = 3e-3
    """Peak learning rate of AdamW, for embeddings, norms and biases, with the same schedule."""
    warmup_steps: int = 30
    mix: SearcherMix = field(default_factory=SearcherMix)


def build_model(seed: int) -> Qwen2ForCausalLM:
    """Create a Qwen2 of 250k parameters with random fp32 weights."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        initializer_range=0.08,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=stop_token_ids(),
        pad_token_id=PAD_ID,
        dtype="float32",
    )
    return Qwen2ForCausalLM(config)


def batches(settings: WarmStartSettings) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (input ids, labels) without end, int64 [sequences, tokens]; prompts and padding have no label."""
    rng = random.Random(settings.seed)
    ids = {word: i for i, word in enumerate(VOCABULARY)}
    while True:
        pool: list[tuple[list[int], int]] = []
        for _ in range(settings.pool):
            demonstration = draw_demonstration(rng, settings.mix)
            prompt = [ids[word] for word in demonstration.puzzle.text.split()]
            pool.append((prompt + [ids[word] for word in demonstration.response.split()], len(prompt)))
        pool.sort(key=lambda sequence: -len(sequence[0]))
        cut: list[list[tuple[list[int], int]]] = [[]]
        for sequence in pool:
            if cut[-1] and (len(cut[-1]) + 1) * len(cut[-1][0][0]) > settings.tokens_per_batch:
                cut.append([])
            cut[-1].append(sequence)
        rng.shuffle(cut)
        yield from map(_padded, cut)


def _padded(sequences: list[tuple[list[int], int]]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(tokens) for tokens, _ in sequences)
    inputs = torch.full((len(sequences), width), PAD_ID, dtype=torch.int64)
    labels = torch.full((len(sequences), width), _IGNORED_LABEL, dtype=torch.int64)
    for row, (tokens, prompt_length) in enumerate(sequences):
        inputs[row, : len(tokens)] = torch.tensor(tokens)
        labels[row, prompt_length : len(tokens)] = inputs[row, prompt_length : len(tokens)]
    return inputs, labels


def learning_rate_scale(step: int, settings: WarmStartSettings) -> float:
    """Return the share of the peak learning rate: linear warm-up, then cosine to zero."""
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    done = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * done))


def train(settings: WarmStartSettings, log_every: int = 100) -> Qwen2ForCausalLM:
    """Train from random weights with cross-entropy on the tokens of the responses."""
    model = build_model(settings.seed)
    embedding = model.get_input_embeddings().weight
    matrices = [p for p in model.parameters() if p.ndim == 2 and p is not embedding]
    others = [p for p in model.parameters() if p.ndim != 2 or p is embedding]
    muon = torch.optim.Muon(
        matrices, lr=settings.matrix_learning_rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW(others, lr=settings.other_learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    schedules = [LambdaLR(o, lambda step: learning_rate_scale(step, settings)) for o in (muon, adamw)]
    started = time.process_time()
    for step, (inputs, labels) in zip(range(settings.steps), batches(settings), strict=False):
        loss = response_loss(model, inputs, labels, settings.tokens_per_batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip((muon, adamw), schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        if log_every and (step + 1) % log_every == 0:
            print(f"step {step + 1:4d}  loss {loss.item():.4f}  {time.process_time() - started:6.1f} cpu-s", flush=True)
    return model


def response_loss(
    model: Qwen2ForCausalLM, inputs: torch.Tensor, labels: torch.Tensor, tokens_per_batch: int
) -> torch.Tensor:
    """Compute the summed cross-entropy over the labelled tokens, divided by the token budget.

    Division by the number of labelled tokens would give batches of short responses, with fewer of them, more weight.
    """
    logits = model(input_ids=inputs[:, :-1], use_cache=False).logits
    total = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=_IGNORED_LABEL, reduction="sum"
    )
    return total / tokens_per_batch


def save(model: Qwen2ForCausalLM, folder: Path) -> None:
    """Write a Hugging Face folder: weights, config, tokenizer, and both end marks as stop tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        eos_token_id=stop_token_ids(), pad_token_id=PAD_ID
    )
    model.save_pretrained(folder)
    save_tokenizer(folder)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Train the countdown warm start.")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    save(train(WarmStartSettings()), args.out)


if __name__ == "__main__":
    main()
