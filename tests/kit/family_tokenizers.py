"""Tokenizers of model families: bytes, a few merges, and the special tokens that a family's renderer looks for."""

import json
from pathlib import Path
from typing import Any

from renderers import config_from_name, create_renderer
from tokenizers import Tokenizer as HfTokenizer

from rollmesh.text import Tokenizer

from .chat_tokenizers import write_tokenizer


def write_family_tokenizer(folder: Path, family: str, template: str = "", text: str = "") -> Path:
    """A tokenizer folder that the renderer of ``family`` accepts, with the words of ``text`` as tokens."""
    write_tokenizer(folder, template, vocab_size=600 if text else 300, text=text)
    file = folder / "tokenizer.json"
    backend = HfTokenizer.from_file(str(file))
    backend.add_tokens(["<think>"])  # tokenizers have it, although not every renderer asks for it
    renderer = create_renderer(_Growing(backend), config_from_name(family))
    ends = renderer.get_stop_token_ids()
    backend.save(str(file))
    (folder / "config.json").write_text(json.dumps({"vocab_size": backend.get_vocab_size(), "eos_token_id": ends}))
    return folder


def make_family_tokenizer(folder: Path, family: str, template: str = "") -> Tokenizer:
    return Tokenizer(write_family_tokenizer(folder, family, template))


class _Growing:
    """Tokenizer that adds every token that it is asked for."""

    def __init__(self, backend: HfTokenizer) -> None:
        self._backend = backend
        self.name_or_path, self.unk_token_id, self.eos_token_id = "growing", None, None

    def encode(self, text: str, *args: Any, **kwargs: Any) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Any, *args: Any, **kwargs: Any) -> str:
        return str(self._backend.decode(ids, skip_special_tokens=False))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        if self._backend.token_to_id(tokens) is None:
            self._backend.add_special_tokens([tokens])
        return self._backend.token_to_id(tokens)
