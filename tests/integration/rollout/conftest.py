"""A real Redis per session, a fresh run name per test."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from rollmesh.config.store import StoreConfig
from rollmesh.store import EmbeddedOptions, EmbeddedServer, TrajectoryStore
from rollmesh.text import Tokenizer

from .scripted import STOP, VOCAB

_NUMBERS = itertools.count()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    embedded = EmbeddedServer(tmp_path_factory.mktemp("redis"), EmbeddedOptions(maxmemory_bytes=1 << 28))
    embedded.start()
    yield embedded
    embedded.kill()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    """A server that the test may kill."""
    embedded = EmbeddedServer(tmp_path / "redis", EmbeddedOptions(appendfsync="always", maxmemory_bytes=1 << 26))
    embedded.start()
    yield embedded
    embedded.kill()


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
