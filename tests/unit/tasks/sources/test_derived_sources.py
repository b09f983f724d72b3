"""Repeated prompts, prompts for agents, and domains: of a mixture and of rows."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from rollmesh.config.data import DataConfig
from rollmesh.config.recipes import resolve_model
from rollmesh.errors import DataError
from rollmesh.tasks.sources.derived import AgentPrompts, RepeatedPrompts, task_of
from rollmesh.tasks.sources.source_protocol import RowSource, Split, build_prompt_source
from rollmesh.text import Tokenizer
from rollmesh.wire.codec import prompt_from_pb, prompt_to_pb


def test_every_prompt_of_an_epoch_comes_as_often_as_it_is_repeated(tokenizer) -> None:
    source = build_prompt_source(DataConfig(), tokenizer, seed=3)
    repeated = RepeatedPrompts(source, 3)
    assert repeated.epoch_size == 3 * source.epoch_size
    ids = [repeated.prompt(1, index).prompt_id for index in range(9)]
    assert ids == [source.prompt(1, index).prompt_id for index in (0, 0, 0, 1, 1, 1, 2, 2, 2)]
    assert len(set(ids)) == 3
    last = repeated.epoch_size - 1
    assert repeated.prompt(0, last).prompt_id == source.prompt(0, source.epoch_size - 1).prompt_id


@pytest.fixture(scope="module")
def plain() -> Tokenizer:
    return Tokenizer(resolve_model("recipe:countdown"))


@pytest.fixture
def chat(tmp_path: Path) -> Tokenizer:
    source = resolve_model("recipe:countdown")
    for file in ("tokenizer.json", "config.json", "generation_config.json"):
        (tmp_path / file).write_bytes((source / file).read_bytes())
    template = "{% for m in messages %}{{ m.content }} {% endfor %}{% if add_generation_prompt %}:{% endif %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return Tokenizer(tmp_path)


def test_a_plain_prompt_is_told_as_text_and_its_answer_beside_it(plain: Tokenizer) -> None:
    source = build_prompt_source(DataConfig(), plain, 0, keep_messages=True)
    prompts = AgentPrompts(source, plain, "task")
    prompt = prompt_from_pb(prompt_to_pb(prompts.prompt(0, 3)))
    original = source.prompt(0, 3)
    assert prompt.token_ids.tolist() == original.token_ids.tolist()
    task = task_of(prompt)
    assert plain.encode(task.text, special_tokens=True).tolist() == original.token_ids.tolist()
    assert task.messages is None
    assert task.metadata == original.metadata
    assert prompts.epoch_size == source.epoch_size


def test_a_chat_prompt_is_told_as_the_messages_it_was_rendered_from(chat: Tokenizer, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    messages = [{"role": "system", "content": "1 2"}, {"role": "user", "content": "3 4 >"}]
    rows.write_text("\n".join(json.dumps({"prompt": p, "answer": "7"}) for p in (messages, "5 6 >")))
    config = DataConfig.model_validate(
        {"source": {"type": "jsonl", "path": str(rows), "chat": True}, "held_out_ratio": 0, "shuffle": False}
    )
    source = build_prompt_source(config, chat, 0, keep_messages=True)
    tasks = [task_of(prompt_from_pb(prompt_to_pb(AgentPrompts(source, chat, "task").prompt(0, i)))) for i in range(2)]
    assert [task.messages for task in tasks] == [messages, [{"role": "user", "content": "5 6 >"}]]
    for index, task in enumerate(tasks):
        assert chat.render_chat(task.messages).tolist() == source.prompt(0, index).token_ids.tolist()
        assert task.metadata == {"answer": "7"}
    assert "_messages" not in build_prompt_source(config, chat, 0).prompt(0, 0).metadata


def test_a_free_context_shares_the_first_token_only(plain: Tokenizer) -> None:
    source = build_prompt_source(DataConfig(), plain, 0, keep_messages=True)
    prompt = AgentPrompts(source, plain, "free").prompt(0, 3)
    whole = source.prompt(0, 3).token_ids
    assert prompt.token_ids.tolist() == whole[:1].tolist()
    assert plain.encode(task_of(prompt).text).tolist() == whole.tolist()


def table(path: Path, count: int, **fields: Any) -> dict[str, Any]:
    """A table of ``count`` questions, as a source of the run file."""
    rows = [{"prompt": f"{path.stem} {i}", "answer": i} | fields for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"type": "jsonl", "path": str(path)}


def part(name: str, weight: float, source: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "weight": weight, "source": source}


def mixture(parts: Sequence[dict[str, Any]], tokenizer: Tokenizer, split: Split = "train", **data: Any) -> RowSource:
    section = {"source": {"type": "mixture", "parts": parts}, "held_out_ratio": 0, **data}
    return build_prompt_source(DataConfig.model_validate(section), tokenizer, 3, split)


@pytest.fixture
def parts(tmp_path: Path) -> list[dict[str, Any]]:
    return [
        part("algebra", 0.7, table(tmp_path / "algebra.jsonl", 40)),
        part("code", 0.3, table(tmp_path / "code.jsonl", 10)),
    ]


def test_a_mixture_has_each_domain_at_its_weight_from_the_first_prompts_on(
    parts: list[dict[str, Any]], tokenizer: Tokenizer
) -> None:
    source = mixture(parts, tokenizer)
    domains = [source.prompt(0, index).domain for index in range(source.epoch_size)]
    assert Counter(domains) == {"algebra": 7000, "code": 3000}
    for first in range(0, 1000, 10):
        assert 2 <= domains[first : first + 10].count("code") <= 4


def test_a_part_comes_whole_before_it_repeats_and_its_prompts_name_it(
    parts: list[dict[str, Any]], tokenizer: Tokenizer
) -> None:
    source = mixture(parts, tokenizer)
    code = [p for i in range(400) if (p := source.prompt(0, i)).domain == "code"]
    for first in (0, 10, 20):
        assert {p.prompt_id for p in code[first : first + 10]} == {f"code/code.jsonl:{line}" for line in range(1, 11)}
    assert [p.prompt_id for p in code[:10]] != [p.prompt_id for p in code[10:20]], "each epoch has its own order"


def test_each_part_of_a_mixture_is_sorted_once_an_epoch(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = mixture([part(f"p{n}", 0.125, table(tmp_path / f"p{n}.jsonl", 50 + n)) for n in range(8)], tokenizer)
    sorted_sizes: Counter[int] = Counter()
    sort = np.argsort

    def counted(values: Any, *args: Any, **options: Any) -> Any:
        sorted_sizes[len(values)] += 1
        return sort(values, *args, **options)

    monkeypatch.setattr(np, "argsort", counted)
    domains = Counter(source.prompt(0, index).domain for index in range(400))
    assert domains == {f"p{n}": 50 for n in range(8)}
    assert sorted_sizes == {50 + n: 1 for n in range(8)}


def test_the_rows_of_a_mixture_are_those_of_its_parts(parts: list[dict[str, Any]], tokenizer: Tokenizer) -> None:
    source = mixture(parts, tokenizer)
    rows = source.rows()
    assert Counter(rows.domains) == {"algebra": 40, "code": 10}
    assert dict(rows.weights) == {"algebra": 0.7, "code": 0.3}
    assert len(set(rows.names)) == 50
    for row, domain in enumerate(rows.domains):
        prompt = source.drawn(row, 0, 5)
        assert (prompt.domain, prompt.prompt_id.partition("/")[0]) == (domain, domain)
    assert len({source.drawn(row, 0, 5).prompt_id for row in range(50)}) == 50


@pytest.mark.parametrize(
    ("weights", "problem"),
    [
        ((0.7, 0.2), "the weights sum to 0.9; they must sum to 1"),
        ((0.7, 0.0), "parts.1.weight"),
        ((1.0, 0.3), "the weights sum to 1.3; they must sum to 1"),
    ],
)
def test_weights_that_are_no_shares_are_refused(
    parts: list[dict[str, Any]], tokenizer: Tokenizer, weights: tuple[float, float], problem: str
) -> None:
    with pytest.raises(ValidationError, match=problem):
        mixture([one | {"weight": weight} for one, weight in zip(parts, weights, strict=True)], tokenizer)


@pytest.mark.parametrize("name", ["", "a b", "x" * 65, "domain:code"])
def test_a_domain_needs_a_name_that_metrics_can_have(
    parts: list[dict[str, Any]], tokenizer: Tokenizer, name: str
) -> None:
    with pytest.raises(ValidationError, match="parts.0.name"):
        mixture([parts[0] | {"name": name}, parts[1]], tokenizer)


def test_two_parts_of_one_name_are_refused(parts: list[dict[str, Any]], tokenizer: Tokenizer) -> None:
    with pytest.raises(ValidationError, match="the name code comes more than once; a part is a domain of its own"):
        mixture([parts[0] | {"name": "code"}, parts[1]], tokenizer)


def test_a_domain_without_a_row_is_refused_with_its_file(
    parts: list[dict[str, Any]], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    empty = part("code", 0.3, table(tmp_path / "empty.jsonl", 0))
    with pytest.raises(DataError, match=r"empty\.jsonl: no rows"):
        mixture([parts[0], empty], tokenizer)


def test_a_field_of_the_rows_names_their_domain(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source = table(tmp_path / "rows.jsonl", 6, topic="number-theory")
    config = DataConfig.model_validate({"source": source, "domain_field": "topic", "held_out_ratio": 0})
    found = build_prompt_source(config, tokenizer, 3)
    assert {found.prompt(0, index).domain for index in range(6)} == {"number-theory"}
    assert set(found.rows().domains) == {"number-theory"}


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "a", "answer": 1}, "field 'topic' is missing"),
        ({"prompt": "a", "answer": 1, "topic": None}, "field 'topic' is null"),
        ({"prompt": "a", "answer": 1, "topic": "two words"}, r"data\.domain_field.*got 'two words'"),
        ({"prompt": "a", "answer": 1, "topic": 7}, r"data\.domain_field.*got 7"),
    ],
)
def test_a_row_without_a_domain_is_refused_with_its_line(
    tmp_path: Path, tokenizer: Tokenizer, row: dict[str, Any], problem: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in ({**row, "topic": "algebra"}, row)))
    config = DataConfig.model_validate({"source": {"type": "jsonl", "path": str(path)}, "domain_field": "topic"})
    with pytest.raises(DataError, match=rf"rows\.jsonl:2.*({problem})"):
        build_prompt_source(config, tokenizer, 3)


@pytest.mark.parametrize("kind", ["countdown", "mixture"])
def test_a_domain_field_is_refused_where_there_are_no_rows_of_the_user(parts: list[dict[str, Any]], kind: str) -> None:
    source: dict[str, Any] = {"type": kind} | ({"parts": parts} if kind == "mixture" else {})
    with pytest.raises(ValidationError, match=f"domain_field=topic: source.type={kind} has no rows of yours"):
        DataConfig.model_validate({"source": source, "domain_field": "topic"})
