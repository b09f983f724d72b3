"""The task that an outside agent is told, from the prompt that the queue holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollmesh.config.data import DataConfig
from rollmesh.config.recipes import resolve_model
from rollmesh.tasks.sources.derived import AgentPrompts, task_of
from rollmesh.tasks.sources.source_protocol import build_prompt_source
from rollmesh.text import Tokenizer
from rollmesh.wire.codec import prompt_from_pb, prompt_to_pb


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
        assert task.messages is not None
        assert chat.render_chat(task.messages).tolist() == source.prompt(0, index).token_ids.tolist()
        assert task.metadata == {"answer": "7"}
    assert "_messages" not in build_prompt_source(config, chat, 0).prompt(0, 0).metadata


def test_a_free_context_shares_the_first_token_only(plain: Tokenizer) -> None:
    source = build_prompt_source(DataConfig(), plain, 0, keep_messages=True)
    prompt = AgentPrompts(source, plain, "free").prompt(0, 3)
    whole = source.prompt(0, 3).token_ids
    assert prompt.token_ids.tolist() == whole[:1].tolist()
    assert plain.encode(task_of(prompt).text).tolist() == whole.tolist()
