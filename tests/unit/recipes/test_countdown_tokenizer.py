"""The countdown tokenizer: a token per word, and the claim survives decoding."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from rollmesh.recipes.countdown.tokenizer import PAD, STOP_SIGNS, VOCABULARY, VOCABULARY_SIZE, save_tokenizer
from rollmesh.text import Tokenizer

RESPONSE = "1 + 7 = 8 ~ 12 = 4 , 4 + 8 = 12 ~ 12 = 0 !"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(made)
    return made


def test_there_are_96_different_words() -> None:
    assert len(set(VOCABULARY)) == len(VOCABULARY) == VOCABULARY_SIZE == 96


def test_every_number_and_sign_is_one_token_and_text_comes_back(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    ids = tokenizer.encode(RESPONSE)
    assert len(ids) == 20, "two trials of ten tokens"
    assert tokenizer.decode(ids) == RESPONSE
    assert [VOCABULARY[i] for i in ids] == RESPONSE.split()


def test_padding_disappears_and_end_marks_stay_when_special_tokens_are_skipped(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    for sign in STOP_SIGNS:
        ids = [VOCABULARY.index(word) for word in (PAD, "4", sign, PAD)]
        assert tokenizer.decode(ids) == f"4 {sign}"


def test_transformers_reads_it_the_same_way(folder: Path) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ids = theirs.encode(RESPONSE, add_special_tokens=False)
    assert ids == Tokenizer(folder).encode(RESPONSE).tolist()
    assert theirs.decode(ids, skip_special_tokens=True) == RESPONSE
    assert theirs.pad_token_id == VOCABULARY.index(PAD)
