"""A byte-level tokenizer with a chat template, small and real."""

import json
from pathlib import Path

from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from rollmesh.text import Tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TAGGED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The same, with the text of answers marked for training."""
TEXT = "the quick brown fox says hello world, hello there; Observation: the answer is 42\nuser assistant system"


def write_tokenizer(
    folder: Path, template: str = CHATML, *, vocab_size: int = 320, start: str = "special", text: str = ""
) -> Path:
    """A tokenizer folder: bytes and a few merges, <|im_end|> as end of a turn; <|im_start|> is special or "plain"."""
    tokenizer = HfTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|im_start|>", "<|im_end|>"] if start == "special" else ["<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT, text] * 4, trainer)
    if start == "plain":
        tokenizer.add_tokens(["<|im_start|>"])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"vocab_size": tokenizer.get_vocab_size()}))
    return folder


def make_tokenizer(folder: Path, template: str = CHATML) -> Tokenizer:
    """The tokenizer of such a folder."""
    return Tokenizer(write_tokenizer(folder, template))
