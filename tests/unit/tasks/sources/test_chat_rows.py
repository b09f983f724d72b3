"""Rows with chat messages, read from files: nothing of a message is lost on the way into the prompt."""

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollmesh.config.data import DataConfig
from rollmesh.errors import DataError
from rollmesh.tasks.sources.source_protocol import build_prompt_source
from rollmesh.text import Tokenizer
from rollmesh.types import Prompt

from ..conftest import make_tokenizer

UNKNOWN_ROLE = '{"prompt": [{"role": "User", "content": "What is 4 + 4?"}], "answer": "8"}'
DEVELOPER = (
    '{"prompt": [{"role": "developer", "content": "Answer in one word."}, '
    '{"role": "user", "content": "Capital of Peru?"}], "answer": "Lima"}'
)
BEGUN = (
    '{"prompt": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "The sum is"}], "answer": "4"}'
)
TEMPLATE = """{% for m in messages %}{% if m.role in ('system', 'user') %}[{{ m.role }}]{{ m.content }}
{%- elif m.role == 'assistant' %}[assistant]{{ m.content }}
{%- if m.tool_calls is defined %}{% for call in m.tool_calls %}(call {{ call.function | tojson }})
{%- endfor %}{% endif %}
{%- endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""


@pytest.fixture
def chat(tmp_path: Path) -> Tokenizer:
    """A tokenizer of bytes whose chat template knows three roles."""
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return make_tokenizer(tmp_path)


def first_prompt(tokenizer: Tokenizer, path: Path, kind: str = "jsonl") -> Prompt:
    source = {"type": kind, "path": str(path)}
    config = DataConfig.model_validate({"source": source, "held_out_ratio": 0})
    return build_prompt_source(config, tokenizer, 1, keep_messages=True).prompt(0, 0)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (DEVELOPER, "[system]Answer in one word.[user]Capital of Peru?[assistant]"),
        (BEGUN, "[user]2 + 2?[assistant]The sum is"),
    ],
)
def test_every_message_of_a_row_is_in_its_prompt(row: str, expected: str, chat: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(row)
    prompt = first_prompt(chat, tmp_path / "train.jsonl")
    assert chat.decode(prompt.token_ids) == expected
    assert prompt.metadata["_messages"] == json.loads(row)["prompt"]


def test_a_row_whose_message_would_be_lost_is_refused(chat: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(UNKNOWN_ROLE)
    with pytest.raises(DataError, match=r"train.jsonl:1: field 'prompt': message 0 \(role 'User'\): its content would"):
        first_prompt(chat, tmp_path / "train.jsonl")


def test_fields_that_a_table_fills_with_nulls_are_absent(chat: Tokenizer, tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    call = {"function": {"name": "add", "arguments": {"a": 2}}}
    other = {"function": {"name": "find", "arguments": {"city": "Lima"}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": None, "tool_calls": [call, other]},
        {"role": "user", "content": "So?"},
    ]
    table = arrow.Table.from_pylist([{"prompt": messages, "answer": "4"}])
    assert table.to_pylist()[0]["prompt"][0] == {"role": "user", "content": "2 + 2?", "tool_calls": None}
    parquet.write_table(table, tmp_path / "train.parquet")
    prompt = first_prompt(chat, tmp_path / "train.parquet", "parquet")
    assert chat.decode(prompt.token_ids) == (
        '[user]2 + 2?[assistant](call {"name": "add", "arguments": {"a": 2}})'
        '(call {"name": "find", "arguments": {"city": "Lima"}})[user]So?[assistant]'
    )
    assert prompt.metadata["_messages"] == [messages[0], {**messages[1], "content": ""}, messages[2]]


@pytest.mark.parametrize("calls", ["add(2)", [1], {"name": "add"}])
def test_tool_calls_of_another_shape_are_refused(calls: Any, chat: Tokenizer, tmp_path: Path) -> None:
    row = {"prompt": [{"role": "assistant", "content": "", "tool_calls": calls}], "answer": "4"}
    (tmp_path / "train.jsonl").write_text(json.dumps(row))
    with pytest.raises(DataError, match="message 0: tool_calls must be a list of objects, got"):
        first_prompt(chat, tmp_path / "train.jsonl")


WHOLE = '{"prompt": "Say hi", "answer": "hi"}'
HALF = '{"prompt": "Say hi", "answer": "hi", "note": "\\udc00"}'


@pytest.mark.parametrize(
    ("row", "where"),
    [
        (HALF, "field 'note': character 0 is half of a surrogate pair"),
        ('{"prompt": "Say \\ud83d", "answer": "hi"}', "field 'prompt': character 4 is half"),
        (
            '{"prompt": [{"role": "user", "content": "Say \\ud83d"}], "answer": "hi"}',
            "field 'prompt': character 10 is half",
        ),
        ('{"prompt": "Say hi", "answer": "\\udc00"}', "field 'answer': character 0 is half"),
        ('{"prompt": "Say hi", "answer": [{"a": "x\\udc00"}]}', r"field 'answer'\[0\]\.a: character 1 is half"),
        ('{"prompt": "Say hi", "answer": {"x\\udc00": 1}}', "field 'answer': a key: character 1 is half"),
        ('{"prompt": "Say hi", "answer": "hi", "no\\udc00": 1}', r"field 'no\\udc00': its name: character 2 is half"),
    ],
)
def test_half_a_character_anywhere_in_a_row_is_refused_with_the_row(
    row: str, where: str, chat: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "train.jsonl").write_text(f"{WHOLE}\n{row}\n")
    with pytest.raises(DataError, match=f"train.jsonl:2: {where}"):
        first_prompt(chat, tmp_path / "train.jsonl")
    # The two halves of one character are a character.
    (tmp_path / "train.jsonl").write_text(
        row.replace("\\udc00", "\\ud83d\\ude00").replace('\\ud83d"', '\\ud83d\\ude00"')
    )
    assert len(first_prompt(chat, tmp_path / "train.jsonl").token_ids)


@pytest.mark.parametrize(
    ("pack", "words"),
    [
        (gzip.compress, "compressed with gzip; unpack it"),
        (bz2.compress, "compressed with bzip2; unpack it"),
        (lzma.compress, "compressed with xz; unpack it"),
        (lambda data: b"\x28\xb5\x2f\xfd" + data, "compressed with zstd; unpack it"),
        (lambda data: b"PK\x03\x04" + data, "compressed with zip; unpack it"),
        (lambda data: b"PAR1" + data, "Parquet; set type: parquet"),
        (lambda data: b"ARROW1" + data, "Arrow; save it as Parquet"),
        (lambda data: b"\n[" + data + b"]", "one JSON array; write each of its objects on a line"),
        (lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:1", "a pointer of Git LFS"),
        (lambda data: b"<!DOCTYPE html>", "HTML or XML"),
        (lambda data: data.decode().encode("utf-16"), "UTF-16; save it as UTF-8"),
    ],
)
def test_a_file_of_another_format_is_named(
    pack: Callable[[bytes], bytes], words: str, chat: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "train.jsonl").write_bytes(pack(BEGUN.encode()))
    with pytest.raises(DataError, match=f"train.jsonl: not JSON lines: the file is {words}"):
        first_prompt(chat, tmp_path / "train.jsonl")
