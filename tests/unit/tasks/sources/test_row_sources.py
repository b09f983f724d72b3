"""Prompts from tables: order, epochs, held-out rows, and every way a row can be wrong."""

import itertools
import json
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from rollmesh.config.data import DataConfig
from rollmesh.errors import ConfigError, DataError
from rollmesh.tasks.sources.rows import epoch_order
from rollmesh.tasks.sources.source_protocol import PromptSource, Split, build_prompt_source
from rollmesh.text import Tokenizer
from rollmesh.types import Prompt

from ..conftest import BEGIN


def write_jsonl(path: Path, rows: Iterable[Any]) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def open_jsonl(
    path: Path, tokenizer: Tokenizer, *, split: Split = "train", seed: int = 1, **settings: Any
) -> PromptSource:
    source = {"type": "jsonl", "path": str(path), **settings.pop("source", {})}
    return build_prompt_source(DataConfig.model_validate({"source": source, **settings}), tokenizer, seed, split)


def texts(source: PromptSource, tokenizer: Tokenizer, epoch: int = 0) -> list[str]:
    return [tokenizer.decode(source.prompt(epoch, i).token_ids) for i in range(source.epoch_size)]


def numbered(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"question {i}", "answer": i} for i in range(count)]


def test_a_row_becomes_a_prompt_with_its_answer_and_its_other_fields(tmp_path: Path, tokenizer: Tokenizer) -> None:
    row = {"prompt": "1+1", "solution": "2", "level": 3, "tags": ["a", None], "extra": {"x": 0.5, "ok": True}}
    path = write_jsonl(tmp_path / "train.jsonl", [row])
    source = open_jsonl(path, tokenizer, source={"answer_field": "solution"})
    prompt = source.prompt(0, 0)
    assert prompt.token_ids.dtype == np.int32
    assert prompt.token_ids[0] == BEGIN, "the begin token opens the context"
    assert tokenizer.decode(prompt.token_ids) == "1+1"
    assert prompt.prompt_id == "train.jsonl:1"
    assert prompt.verifier == ""
    assert prompt.metadata == {"answer": "2", "level": 3, "tags": ["a", None], "extra": {"x": 0.5, "ok": True}}


def test_fields_may_be_paths_into_nested_fields(tmp_path: Path, tokenizer: Tokenizer) -> None:
    verl = {
        "data_source": "math",
        "prompt": [{"role": "user", "content": "1+1"}],
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"by": "exact", "topic": "sums"},
    }
    path = write_jsonl(tmp_path / "train.jsonl", [verl])
    fields = {"answer_field": "reward_model.ground_truth", "verifier_field": "extra_info.by"}
    prompt = open_jsonl(path, tokenizer, source=fields, domain_field="extra_info.topic").prompt(0, 0)
    assert (prompt.metadata["answer"], prompt.verifier, prompt.domain) == ("2", "exact", "sums")
    assert tokenizer.decode(prompt.token_ids) == "[user]1+1[assistant]"
    for field, problem in {
        "reward_model.truth": "is missing; reward_model has style, ground_truth",
        "reward.truth": "is missing; the row has data_source, prompt, reward_model, extra_info",
        "reward_model.style.name": "is missing; reward_model.style has 'rule'",
    }.items():
        with pytest.raises(DataError, match=problem):
            open_jsonl(path, tokenizer, source={"answer_field": field})
    write_jsonl(path, [{"prompt": "a", "a.b": "flat", "a": {"b": "nested"}}])
    assert open_jsonl(path, tokenizer, source={"answer_field": "a.b"}).prompt(0, 0).metadata["answer"] == "flat"


def test_opening_a_large_table_reports_its_progress_and_can_be_stopped(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write_jsonl(tmp_path / "train.jsonl", numbered(2500))
    config = DataConfig.model_validate({"source": {"type": "jsonl", "path": str(path)}})
    reports: list[tuple[int, int]] = []
    build_prompt_source(config, tokenizer, 1, on_checked=lambda *report: reports.append(report))
    assert reports == [(0, 2500), (1024, 2500), (2048, 2500)]

    def stop(checked: int, count: int) -> None:
        if checked:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        build_prompt_source(config, tokenizer, 1, on_checked=stop)


def test_the_same_position_is_the_same_prompt_after_a_restart(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write_jsonl(tmp_path / "train.jsonl", numbered(50))
    first, again = (open_jsonl(path, tokenizer) for _ in range(2))
    for epoch, index in itertools.product((3, 0, 1), range(first.epoch_size)):
        assert facts(first.prompt(epoch, index)) == facts(again.prompt(epoch, index))


def facts(prompt: Prompt) -> tuple[Any, ...]:
    return prompt.prompt_id, prompt.token_ids.tolist(), prompt.verifier, prompt.metadata


def test_the_content_of_a_table_follows_its_rows_and_nothing_else(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = numbered(20)
    path = write_jsonl(tmp_path / "train.jsonl", rows)
    content = open_jsonl(path, tokenizer).content
    assert re.fullmatch("20 rows [0-9a-f]{16}", content)
    assert open_jsonl(path, tokenizer, split="eval", seed=9).content == content, "one file has both splits"
    spaced = write_jsonl(tmp_path / "spaced.jsonl", [f" {json.dumps(dict(reversed(row.items())))} " for row in rows])
    assert open_jsonl(spaced, tokenizer).content == content
    sources = {"own": {"type": "jsonl", "path": str(path)}, "made": {"type": "countdown"}}
    parts = [{"name": name, "weight": 0.5, "source": source} for name, source in sources.items()]
    config = DataConfig.model_validate({"source": {"type": "mixture", "parts": parts}})
    assert build_prompt_source(config, tokenizer, 1).content == f"own: {content}"
    others = [
        [*rows, {"prompt": "one more", "answer": 1}],
        rows[:-1],
        [rows[1], rows[0], *rows[2:]],
        [{**rows[0], "answer": 7}, *rows[1:]],
        [{**rows[0], "prompt": "another"}, *rows[1:]],
    ]
    found = [open_jsonl(write_jsonl(path, other), tokenizer).content for other in others]
    assert len({content, *found}) == 6


def test_every_epoch_has_every_row_once_in_another_order(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write_jsonl(tmp_path / "train.jsonl", numbered(40))
    source = open_jsonl(path, tokenizer, held_out_ratio=0)
    epochs = [texts(source, tokenizer, epoch) for epoch in range(3)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    other_seed = open_jsonl(path, tokenizer, held_out_ratio=0, seed=2)
    assert texts(other_seed, tokenizer) != epochs[0]


def test_the_order_of_an_epoch_never_changes_between_releases() -> None:
    # A cursor stored by an older release must mean the same rows; these numbers are for ever.
    assert epoch_order(8, seed=7, epoch=2).tolist() == [5, 3, 1, 4, 0, 2, 7, 6]


def test_first_positions_of_an_epoch_are_uniform() -> None:
    firsts = np.bincount([int(epoch_order(5, seed=3, epoch=e)[0]) for e in range(2000)], minlength=5)
    assert firsts.min() > 320
    assert firsts.max() < 480


def test_without_shuffle_the_file_order_is_kept(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write_jsonl(tmp_path / "train.jsonl", numbered(5))
    source = open_jsonl(path, tokenizer, shuffle=False, held_out_ratio=0)
    assert texts(source, tokenizer, epoch=9) == [f"question {i}" for i in range(5)]


def test_positions_outside_an_epoch_are_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source = open_jsonl(write_jsonl(tmp_path / "a.jsonl", numbered(3)), tokenizer, held_out_ratio=0)
    for epoch, index in ((0, 3), (0, -1), (-1, 0)):
        with pytest.raises(IndexError):
            source.prompt(epoch, index)


def test_evaluation_and_training_share_no_prompt_even_when_rows_repeat(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [{"prompt": f"question {i % 60}", "answer": i} for i in range(180)]
    path = write_jsonl(tmp_path / "train.jsonl", rows)
    train = texts(open_jsonl(path, tokenizer, seed=1, held_out_ratio=0.1), tokenizer)
    evaluation = texts(open_jsonl(path, tokenizer, seed=99, held_out_ratio=0.1, split="eval"), tokenizer)
    assert len(set(evaluation)) == 6
    assert not set(train) & set(evaluation)
    assert len(train) + len(evaluation) == 180


def test_an_evaluation_file_leaves_all_rows_to_training(tmp_path: Path, tokenizer: Tokenizer) -> None:
    train_file = write_jsonl(tmp_path / "train.jsonl", numbered(10))
    other = write_jsonl(tmp_path / "eval.jsonl", [{"prompt": "held back", "answer": 1}])
    settings = {"evaluation_source": {"type": "jsonl", "path": str(other)}}
    assert open_jsonl(train_file, tokenizer, **settings).epoch_size == 10
    assert texts(open_jsonl(train_file, tokenizer, split="eval", **settings), tokenizer) == ["held back"]


def test_a_single_prompt_is_trained_on_and_cannot_be_evaluated(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write_jsonl(tmp_path / "one.jsonl", numbered(1))
    assert open_jsonl(path, tokenizer).epoch_size == 1
    with pytest.raises(DataError, match="no rows for the eval split; it has 1 in all"):
        open_jsonl(path, tokenizer, split="eval")


def test_variables_of_the_run_reach_the_chat_template_of_every_split(
    tmp_path: Path, thinking_tokenizer: Tokenizer
) -> None:
    path = write_jsonl(tmp_path / "chat.jsonl", numbered(4))

    def opened(split: Split, **variables: bool) -> list[str]:
        settings = {"source": {"chat": True}, "held_out_ratio": 0.5, "chat_template_kwargs": variables}
        return texts(open_jsonl(path, thinking_tokenizer, split=split, **settings), thinking_tokenizer)

    for split in get_args(Split):
        assert all(text.endswith("[assistant]") for text in opened(split))
        assert all(text.endswith("[assistant]<think></think>") for text in opened(split, enable_thinking=False))
    with pytest.raises(DataError, match="chat_template_kwargs.think: the chat template of .* it reads enable_thinking"):
        opened("train", think=False)


def test_chat_prompts_go_through_the_template(tmp_path: Path, tokenizer: Tokenizer) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    path = write_jsonl(tmp_path / "chat.jsonl", [{"prompt": messages}, {"prompt": "plain"}])
    source = open_jsonl(path, tokenizer, source={"chat": True, "answer_field": None}, shuffle=False, held_out_ratio=0)
    assert texts(source, tokenizer) == ["[system]be brief[user]hi[assistant]", "[user]plain[assistant]"]


def test_a_prompt_may_be_given_as_token_ids(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write_jsonl(tmp_path / "ids.jsonl", [{"prompt": [5, 6, 7], "answer": ""}])
    assert open_jsonl(path, tokenizer).prompt(0, 0).token_ids.tolist() == [5, 6, 7]


def test_blank_lines_and_a_byte_order_mark_are_skipped_but_counted(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "gaps.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a", "answer": 1}\r\n\r\n   \n{"prompt": "b", "answer": 2}')
    source = open_jsonl(path, tokenizer, shuffle=False, held_out_ratio=0)
    assert [source.prompt(0, i).prompt_id for i in range(2)] == ["gaps.jsonl:1", "gaps.jsonl:4"]


def test_rows_may_name_their_verifier(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write_jsonl(tmp_path / "mixed.jsonl", [{"prompt": "a", "answer": 1, "by": "numeric"}])
    prompt = open_jsonl(path, tokenizer, source={"verifier_field": "by"}).prompt(0, 0)
    assert prompt.verifier == "numeric"
    assert prompt.metadata == {"answer": 1}


GOOD = {"prompt": "fine", "answer": 1}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "a", "answer": 1}, "field 'prompt' is missing; the row has question, answer"),
        ({"prompt": "a"}, "field 'answer' is missing; the row has prompt"),
        ({"prompt": None, "answer": 1}, "field 'prompt' is null"),
        ({"prompt": "a", "answer": None}, "field 'answer' is null"),
        ({"prompt": "", "answer": 1}, "field 'prompt': the prompt is empty"),
        ({"prompt": " \n\t", "answer": 1}, "field 'prompt': the prompt is empty"),
        ({"prompt": [], "answer": 1}, "field 'prompt': the prompt has no tokens"),
        ({"prompt": 7, "answer": 1}, "field 'prompt': expected text, chat messages or token ids, got 7"),
        ({"prompt": [{"role": "user"}], "answer": 1}, "message 0 needs role and content"),
        ({"prompt": [{"role": "user", "content": " "}], "answer": 1}, "the prompt is empty"),
        ({"prompt": [1, 999], "answer": 1}, r"token_ids\[1\]: id 999 is outside the vocabulary"),
        ({"prompt": [1, -1], "answer": 1}, r"token_ids\[1\]: id -1 is outside the vocabulary"),
        ({"prompt": "x" * 65, "answer": 1}, "the prompt has 66 tokens, more than data.max_prompt_tokens=64"),
        ('{"prompt": "a", "answer": NaN}', "not valid JSON: NaN is not a JSON value"),
        ('{"prompt": "a", ', "not valid JSON"),
        ("[1, 2]", "expected a JSON object, got list"),
        ("[" * 100_000, "nested too deeply|not valid JSON"),
    ],
)
def test_a_bad_row_is_refused_at_once_with_file_line_and_field(
    tmp_path: Path, tokenizer: Tokenizer, row: Any, message: str
) -> None:
    path = write_jsonl(tmp_path / "bad.jsonl", [GOOD, GOOD, row])
    with pytest.raises(DataError, match=rf"bad\.jsonl:3: .*(?:{message})"):
        open_jsonl(path, tokenizer, max_prompt_tokens=64)


@pytest.mark.parametrize("name", ["nonsense", "os:system", 7])
def test_a_row_cannot_name_an_unknown_verifier_or_code(tmp_path: Path, tokenizer: Tokenizer, name: Any) -> None:
    path = write_jsonl(tmp_path / "bad.jsonl", [{**GOOD, "by": name}])
    with pytest.raises(DataError, match=r"bad\.jsonl:1: field 'by': unknown verifier"):
        open_jsonl(path, tokenizer, source={"verifier_field": "by"})


def test_bytes_that_are_not_text_are_refused_by_line(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"prompt": "a", "answer": 1}\n{"prompt": "caf\xe9", "answer": 1}\n')
    with pytest.raises(DataError, match=r"latin\.jsonl:2: not UTF-8"):
        open_jsonl(path, tokenizer)


def test_an_empty_or_missing_file_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match=r"empty\.jsonl: no rows"):
        open_jsonl(write_jsonl(tmp_path / "empty.jsonl", []), tokenizer)
    with pytest.raises(DataError, match=r"missing\.jsonl: cannot be read: No such file"):
        open_jsonl(tmp_path / "missing.jsonl", tokenizer)


def test_a_file_that_changes_under_the_run_is_noticed(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write_jsonl(tmp_path / "train.jsonl", numbered(3))
    source = open_jsonl(path, tokenizer, held_out_ratio=0)
    write_jsonl(path, numbered(4))
    os.utime(path, ns=(1, 1))
    with pytest.raises(DataError, match="the file changed while the run was reading it"):
        source.prompt(0, 0)


def test_a_parquet_file_gives_the_same_prompts_as_the_same_rows_in_jsonl(tmp_path: Path, tokenizer: Tokenizer) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"prompt": f"q{i}", "answer": str(i), "tests": [{"input": "1", "output": "2"}]} for i in range(9)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    twin = open_jsonl(write_jsonl(tmp_path / "train.jsonl", rows), tokenizer)
    config = DataConfig.model_validate({"source": {"type": "parquet", "path": str(tmp_path / "train.parquet")}})
    source = build_prompt_source(config, tokenizer, 1)
    assert source.epoch_size == twin.epoch_size
    assert texts(source, tokenizer, 1) == texts(twin, tokenizer, 1)
    assert all(source.prompt(1, i).metadata == twin.prompt(1, i).metadata for i in range(source.epoch_size))


def test_a_bad_parquet_row_or_file_is_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "train.parquet"
    config = DataConfig.model_validate({"source": {"type": "parquet", "path": str(path)}})
    for content in (None, b"PAR1 torn"):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(DataError, match=r"train\.parquet: not a readable Parquet file"):
            build_prompt_source(config, tokenizer, 1)
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": None, "answer": "2"}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    with pytest.raises(DataError, match=r"train\.parquet: row 2: field 'prompt' is null"):
        build_prompt_source(config, tokenizer, 1)


OWN_ROWS = """
def rows(count=3):
    return [{"prompt": f"p{i}", "answer": i} for i in range(count)]

def stream():
    yield {"prompt": "from a generator", "verifier": "exact"}

def numbered():
    return [{"prompt": "1", "answer": "1", 5: "x"}]

def wrong():
    return ["not a mapping"]

number = 7
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_rows_module.py").write_text(OWN_ROWS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_rows_module", raising=False)
    return "own_rows_module"


def open_python(tokenizer: Tokenizer, target: str, **options: Any) -> PromptSource:
    source = {"type": "python", "target": target, "options": options}
    return build_prompt_source(DataConfig.model_validate({"source": source, "held_out_ratio": 0}), tokenizer, 1)


def test_a_callable_in_the_working_directory_gives_prompts(own_module: str, tokenizer: Tokenizer) -> None:
    source = open_python(tokenizer, f"{own_module}:rows", count=4)
    assert sorted(texts(source, tokenizer)) == ["p0", "p1", "p2", "p3"]
    streamed = open_python(tokenizer, f"{own_module}:stream").prompt(0, 0)
    assert (streamed.verifier, dict(streamed.metadata)) == ("exact", {})


@pytest.mark.parametrize(
    ("target", "options", "error", "message"),
    [
        ("own_rows_module:missing", {}, ConfigError, "data.source.target: module 'own_rows_module' has no 'missing'"),
        ("own_rows_module:number", {}, ConfigError, "is not callable"),
        ("own_rows_module:rows", {"size": 1}, ConfigError, "data.source.options: .* rejects"),
        ("own_rows_module:numbered", {}, DataError, r"own_rows_module:numbered\[0\]: the name 5 of a field is int"),
        ("own_rows_module:wrong", {}, DataError, r"own_rows_module:wrong\[0\]: expected a mapping"),
    ],
)
def test_a_wrong_callable_is_named(
    own_module: str, tokenizer: Tokenizer, target: str, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        open_python(tokenizer, target, **options)
