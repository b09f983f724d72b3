"""Inputs of the countdown model's warm start: ``python -m rollmesh.recipes.countdown.warm_start --out DIR``.

It writes a model with random weights (``start``) and rows of demonstrations (``rows.jsonl``, ``held-out.jsonl``), from
which ``rollmesh sft`` makes the warm start with the settings of examples/warm-start.yaml (measurements: MODEL.md).
"""

import argparse
import json
import random
from pathlib import Path

import torch
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from rollmesh.recipes.countdown.demonstrations import SearcherMix, draw_demonstration
from rollmesh.recipes.countdown.tokenizer import PAD, VOCABULARY, VOCABULARY_SIZE, save_tokenizer, stop_token_ids

_PAD_ID = VOCABULARY.index(PAD)


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
        pad_token_id=_PAD_ID,
        dtype="float32",
    )
    return Qwen2ForCausalLM(config)


def write_start(folder: Path, seed: int) -> None:
    """Write a Hugging Face folder with random weights, the tokenizer, and both end marks as stop tokens."""
    model = build_model(seed)
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        eos_token_id=stop_token_ids(), pad_token_id=_PAD_ID
    )
    model.save_pretrained(folder)
    save_tokenizer(folder)


def write_rows(file: Path, count: int, seed: int) -> None:
    """Write demonstrations as rows of prompt and response."""
    rng, mix = random.Random(seed), SearcherMix()
    shown = (draw_demonstration(rng, mix) for _ in range(count))
    rows = ({"prompt": each.puzzle.text, "response": each.response} for each in shown)
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Write what the countdown warm start is made of.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=45_000)
    args = parser.parse_args()
    write_start(args.out / "start", seed=11)
    write_rows(args.out / "rows.jsonl", args.rows, seed=11)
    write_rows(args.out / "held-out.jsonl", max(1, args.rows // 100), seed=12)


if __name__ == "__main__":
    main()
