"""A small real tokenizer that the tests of sources share."""

import json
from pathlib import Path

import pytest
import tokenizers

from rollmesh.text import Tokenizer

from ...kit.answers import byte_tokenizer

BEGIN = 256


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A byte-level tokenizer (one token per byte) with a begin token and a chat template."""
    return make_tokenizer(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="session")
def thinking_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The same with a chat template that reads enable_thinking."""
    closed = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    return make_tokenizer(tmp_path_factory.mktemp("thinking"), closed)


def make_tokenizer(folder: Path, end: str = "") -> Tokenizer:
    """A byte-level tokenizer whose chat template ends with ``end``."""
    made = byte_tokenizer()
    made.add_special_tokens(["<s>"])
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BEGIN)])
    made.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]" + end
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return Tokenizer(folder)
