"""Word-level tokenizer of the countdown model: one token per number and per sign, 96 in total."""

import json
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

PAD = "<pad>"
UNKNOWN = "<unk>"
SIGNS = (">", ":", "+", "-", "=", "~", ",", "!", "?")
STOP_SIGNS = ("!", "?")
VOCABULARY_SIZE = 96

VOCABULARY = (PAD, UNKNOWN, *SIGNS, *map(str, range(VOCABULARY_SIZE - 2 - len(SIGNS))))
"""Tokens by id: special tokens, signs, then the numbers 0 to 84."""


def build_tokenizer() -> Tokenizer:
    """Build the tokenizer; spaces separate words, also in decoded text."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([PAD, UNKNOWN])
    return tokenizer


def stop_token_ids() -> list[int]:
    """Return the ids of ``!`` and ``?``; they are plain words, which decoding without special tokens keeps."""
    return [VOCABULARY.index(sign) for sign in STOP_SIGNS]


def save_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    build_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "unk_token": UNKNOWN,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
