"""A real Redis per session, a fresh run name per test."""

import itertools
import json
from collections.abc import AsyncIterator

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from rollmesh.config.store import StoreConfig
from rollmesh.store import EmbeddedServer, TrajectoryStore
from rollmesh.text import Tokenizer

from .scripted import STOP, VOCAB

_NUMBERS = itertools.count()


@pytest.fixture
async def store(server: EmbeddedServer) -> AsyncIterator[TrajectoryStore]:
    name = f"rollout-{next(_NUMBERS)}"
    async with await TrajectoryStore.connect(StoreConfig(), run=name, url=server.url) as connected:
        yield connected


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    RawTokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0")).save(str(folder / "tokenizer.json"))
    raw = RawTokenizer.from_file(str(folder / "tokenizer.json"))
    raw.pre_tokenizer = WhitespaceSplit()
    raw.add_special_tokens([f"w{STOP}"])
    raw.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCAB, "eos_token_id": STOP}))
    return Tokenizer(folder)
