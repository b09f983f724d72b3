"""Rows of fine-tuning: the assistant's tokens are targets and no others, and a bad row is named with its remedy.

The expected targets are written by hand, as text.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers

from rollmesh.config.recipes import resolve_model
from rollmesh.config.sft_config import RowOptions
from rollmesh.errors import DataError
from rollmesh.sft.training_rows import SftRow, read_rows
from rollmesh.text import Tokenizer

from ...kit.chat_tokenizers import CHATML, TAGGED, make_tokenizer
from ...kit.family_tokenizers import make_family_tokenizer

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
WITH_CALLS = CHATML.replace(
    "{{ m.content }}",
    "{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}",
).replace("{% for m in", "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in", 1)


def say(role: str, content: str, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


TURNS = [
    say("system", "be brief"),
    say("user", "2?"),
    say("assistant", "42"),
    say("user", "hello?"),
    say("assistant", "é!"),
]


def read(
    tokenizer: Tokenizer, *rows: dict[str, Any], folder: Path | None = None, context: int = 10_000, **options: Any
) -> list[SftRow]:
    file = (folder or tokenizer.folder) / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return read_rows([file], tokenizer, RowOptions(**options), context)


def targets(tokenizer: Tokenizer, row: SftRow) -> list[str]:
    """The texts that are trained on, one for each run of targets."""
    edges = np.flatnonzero(np.diff(row.loss_mask.astype(int), prepend=0, append=0)).reshape(-1, 2)
    return [tokenizer.decode(row.token_ids[begin:stop], special_tokens=True) for begin, stop in edges]


def test_a_response_and_its_end_are_targets_and_the_prompt_is_not(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path)
    rows = read(
        tokenizer,
        {"prompt": "hello wor", "response": "ld, the answer"},
        {"prompt": "a", "response": "b<|im_end|>", "source": "elsewhere"},
    )
    assert [targets(tokenizer, row) for row in rows] == [["ld, the answer<|im_end|>"], ["b<|im_end|>"]]
    # A generator reads the prompt's own tokens: none is merged with the response.
    prompt = tokenizer.encode("hello wor")
    np.testing.assert_array_equal(rows[0].token_ids[: len(prompt)], prompt)
    assert not rows[0].loss_mask[: len(prompt)].any()


def test_a_model_without_an_end_of_its_tokenizer_gets_responses_as_they_are(tmp_path: Path) -> None:
    tokenizer = Tokenizer(resolve_model("recipe:countdown"))  # "!" and "?" end its responses, and are words of them
    (row,) = read(tokenizer, {"prompt": "3 5 > 8 :", "response": "3 + 5 = 8 ~ 8 = 0 ,"}, folder=tmp_path)
    assert targets(tokenizer, row) == ["3 + 5 = 8 ~ 8 = 0 ,"]


@pytest.mark.parametrize("template", [CHATML, TAGGED], ids=["found by difference", "marked by the template"])
def test_every_turn_of_the_assistant_is_a_target_with_its_end(tmp_path: Path, template: str) -> None:
    tokenizer = make_tokenizer(tmp_path, template)
    (row,) = read(tokenizer, {"messages": TURNS})
    assert targets(tokenizer, row) == ["42<|im_end|>", "é!<|im_end|>"]
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in TURNS)
    assert tokenizer.decode(row.token_ids, special_tokens=True) == text


def test_an_end_that_the_template_left_outside_of_its_tag_is_a_target_too(tmp_path: Path) -> None:
    outside = TAGGED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
    tokenizer = make_tokenizer(tmp_path, outside)
    (row,) = read(tokenizer, {"messages": TURNS})
    assert targets(tokenizer, row) == ["42<|im_end|>", "é!<|im_end|>"]


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)], ids=["objects", "JSON text"])
def test_calls_are_targets_and_tools_and_their_results_are_not(tmp_path: Path, tools: Any) -> None:
    tokenizer = make_tokenizer(tmp_path, WITH_CALLS)
    chat = [say("user", "2?"), say("assistant", "", tool_calls=[CALL]), say("tool", "4"), say("assistant", "4.")]
    (row,) = read(tokenizer, {"messages": chat, "tools": tools})
    call = '<call>{"name": "add", "arguments": {"a": 2}}</call><|im_end|>'
    assert targets(tokenizer, row) == [call, "4.<|im_end|>"]
    assert tokenizer.decode(row.token_ids).startswith(json.dumps(TOOLS[0]))


def test_the_renderer_of_a_family_finds_ends_that_only_the_next_role_writes(tmp_path: Path) -> None:
    from renderers import glm45

    # The format is a fact of the model; the words around its tools come from the package.
    template = (
        "[gMASK]<sop>{% if tools %}<|system|>{{ HEAD }}{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
        "{{ FOOT }}{% endif %}"
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|assistant|>\n<think></think>\n' ~ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ '<tool_call>' ~ c.function.name }}"
        "{% for k, v in c.function.arguments.items() %}{{ '\n<arg_key>' ~ k ~ '</arg_key>\n' }}"
        "{{ '<arg_value>' ~ v ~ '</arg_value>' }}{% endfor %}{{ '\n</tool_call>' }}{% endfor %}"
        "{% elif m.role == 'tool' %}{{ '<|observation|>\n<tool_response>\n' ~ m.content ~ '\n</tool_response>' }}"
        "{% else %}{{ '<|' ~ m.role ~ '|>\n' ~ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    template = template.replace("HEAD", repr(glm45._TOOLS_HEADER)).replace("FOOT", repr(glm45._TOOLS_FOOTER))
    tokenizer = make_family_tokenizer(tmp_path, "glm-4.5", template)
    (row,) = read(tokenizer, {"messages": TURNS})
    assert targets(tokenizer, row) == ["<think></think>\n42<|user|>", "<think></think>\né!<|endoftext|>"]
    # What the renderer would write otherwise than the template is left to the template, which has no ends here.
    other = make_family_tokenizer(
        tmp_path / "other", "glm-4.5", template.replace("m.content }}{% endif", "m.content|upper }}{% endif")
    )
    with pytest.raises(DataError, match="writes none of the end tokens"):
        read(other, {"messages": TURNS})


def test_rows_of_parquet_are_read_with_the_columns_that_they_lack_as_null(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    tokenizer = make_tokenizer(tmp_path, WITH_CALLS)
    chat = [say("user", "2?", tool_calls=None), say("assistant", "4.", tool_calls=[CALL])]
    rows = [{"messages": chat, "prompt": None, "response": None}, {"messages": None, "prompt": "a", "response": "b"}]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "rows")
    found = read_rows([tmp_path / "rows"], tokenizer, RowOptions(), 999)
    assert [targets(tokenizer, row)[0][:2] for row in found] == ["4.", "b<"]


def test_rows_longer_than_the_context_are_dropped_where_that_is_wanted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = make_tokenizer(tmp_path)
    short, long = {"prompt": "a", "response": "b"}, {"prompt": "a", "response": "b" * 50}
    (row,) = read(tokenizer, long, short, long, context=10, too_long="drop")
    assert targets(tokenizer, row) == ["b<|im_end|>"]
    assert "dropped=2" in capsys.readouterr().out
    with pytest.raises(DataError, match="all 1 rows are longer than 10 tokens"):
        read(tokenizer, long, context=10, too_long="drop")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "a"}, "field 'response' is missing"),
        ({"prompt": "a", "response": " "}, "field 'response' is ' '; write a text"),
        ({"prompt": "", "response": "b"}, "field 'prompt' is ''; write a text"),
        ({"prompt": "a", "response": ["b"]}, "field 'response' is .'b'.; write a text"),
        ({"prompt": "a", "response": "b" * 99}, "101 tokens, more than 64 .* set data.too_long: drop"),
        ({"prompt": "a", "response": "\ud83d"}, "field 'response': .*half"),
        ({"question": "a", "answer": "b"}, "its fields are question, answer; name those"),
        ({"messages": TURNS[:2]}, "field 'messages': no message of the role 'assistant'"),
        ({"messages": []}, "field 'messages': expected a list of messages"),
        ({"messages": "hello"}, "field 'messages': expected a list of messages"),
        ({"messages": [say("user", "a"), say("bot", "b")]}, "message 1: unknown role 'bot'; known are system"),
        ({"messages": [say("user", "a"), say("assistant", " ")]}, "message 1 .role 'assistant'. is empty"),
        ({"messages": [say("user", "a"), {"role": "assistant"}]}, "message 1 needs role and content"),
        (
            {"messages": [say("user", "a"), say("assistant", "b", reasoning="c")]},
            "message 1 .*: its reasoning would not be in",
        ),
        ({"messages": TURNS, "tools": TOOLS}, "writes no tools"),
        ({"messages": TURNS, "tools": "{"}, "the tools of the row are not JSON"),
        ({"messages": TURNS, "tools": "[1]"}, "expected a list of objects"),
        # The text of an end token in an answer would end it earlier.
        ({"messages": [say("user", "a"), say("assistant", "b<|im_end|>c")]}, "cannot be found exactly"),
    ],
)
def test_a_bad_row_is_named_by_file_line_and_field(tmp_path: Path, row: dict[str, Any], words: str) -> None:
    tokenizer = make_tokenizer(tmp_path)
    with pytest.raises(DataError, match=rf"rows\.jsonl:2: .*{words}"):
        read(tokenizer, {"prompt": "a", "response": "b"}, row, context=64)


def test_a_response_that_the_tokenizer_drops_whole_is_named(tmp_path: Path) -> None:
    file = make_tokenizer(tmp_path).folder / "tokenizer.json"
    dropping = HfTokenizer.from_file(str(file))
    dropping.normalizer = normalizers.Replace("~", "")
    dropping.save(str(file))
    with pytest.raises(
        DataError, match=r"rows\.jsonl:1: field 'response' is '~~', which the tokenizer reads as no token"
    ):
        read(Tokenizer(tmp_path), {"prompt": "a", "response": "~~"})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "rows.jsonl: has no rows"),
        ("\n\n", "has no rows"),
        ("{", "rows.jsonl:1: not valid JSON"),
        ("[]", "JSON array"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "rows.jsonl").write_text(content)
    with pytest.raises(DataError, match=words):
        read_rows([tmp_path / "rows.jsonl"], make_tokenizer(tmp_path), RowOptions(), 64)
    with pytest.raises(DataError, match="cannot be read"):
        read_rows([tmp_path / "none.jsonl"], make_tokenizer(tmp_path), RowOptions(), 64)


def test_targets_outside_of_the_vocabulary_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="rows.jsonl:1: field 'response': a word .* is not in the vocabulary"):
        eight = {"prompt": "3 5 > 8 :", "response": "eight !"}
        read(Tokenizer(resolve_model("recipe:countdown")), eight, folder=tmp_path)
    tokenizer = make_tokenizer(tmp_path)
    end = tokenizer.eos_token_ids[0]
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 200}))
    assert end < 200
    with pytest.raises(DataError, match=r"field 'messages': token_ids.*is outside the vocabulary \[0, 200\)"):
        read(Tokenizer(tmp_path), {"messages": TURNS})


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (CHATML.replace("<|im_end|>", "<end>"), "writes none of the end tokens of the model after it .*im_end"),
        # The text of an earlier turn depends on what comes after it.
        (CHATML.replace("{{ m.content }}", "{{ m.content }}{{ messages | length }}"), "cannot be found exactly"),
        (TAGGED.replace("m.role == 'assistant'", "loop.last"), "1 parts .* for 3 messages; put {% generation %}"),
        (TAGGED.replace("<|im_end|>", "<end>"), r"message 2 .* has no end token of the model"),
        (TAGGED.replace("{{ m.role }}\n", "hel"), "one token is partly the assistant's, at .*hello"),
    ],
)
def test_turns_that_cannot_be_found_exactly_are_refused(tmp_path: Path, template: str, words: str) -> None:
    tokenizer = make_tokenizer(tmp_path, template)
    with pytest.raises(DataError, match=words):
        read(tokenizer, {"messages": [*TURNS, say("user", "a"), say("assistant", "lo world")]})


def test_a_tokenizer_that_begins_every_text_with_a_space_keeps_its_turns(tmp_path: Path) -> None:
    words = ["▁", *["▁[user]", "▁[assistant]", "▁two", "▁four", "</s>", "▁ok"]]
    backend = HfTokenizer(models.WordLevel({word: at for at, word in enumerate(["<unk>", *words])}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    backend.add_special_tokens(["</s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    template = (
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ '</s>' if m.role == 'assistant' else ' ' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    settings = {"eos_token": "</s>", "unk_token": "<unk>", "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer(tmp_path)
    (row,) = read(
        tokenizer,
        {"messages": [say("user", "two"), say("assistant", "four"), say("user", "ok"), say("assistant", "two")]},
    )
    assert targets(tokenizer, row) == ["four</s>", "two</s>"]
