"""Text to token ids and back, eos ids, chat templates, and what bad folders say."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from rollmesh.errors import DataError
from rollmesh.text import Tokenizer

WORDS = ["<pad>", "<unk>", "<s>", "<end>", "hello", "world", "12", "user", "assistant", ":", "{", "}", '"k"']
TEMPLATE = """{%- for message in messages %}
    {%- if message.role == 'tool' %}{{ raise_exception('no tools here') }}{%- endif %}
{{ message.role }} : {{ message.content | trim }} {{ eos_token }}
    {%- if loop.last %}{% break %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
assistant :
{%- endif %}"""


def make_folder(
    folder: Path, *, settings: dict[str, Any] | None = None, generation: Any = None, config: Any = None
) -> Path:
    """A model folder with a word-level tokenizer that opens a sequence with ``<s>``."""
    vocabulary = {word: i for i, word in enumerate(WORDS)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    made.add_special_tokens(["<pad>", "<unk>", "<s>", "<end>"])
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    for name, value in (("tokenizer_config", settings), ("generation_config", generation), ("config", config)):
        if value is not None:
            (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def rendered(folder: Path, template: Any, text: str = "hello") -> list[int]:
    """Ids of a chat of one message of the user."""
    made = make_folder(folder, settings={"chat_template": template})
    return Tokenizer(made).render_chat([{"role": "user", "content": text}]).tolist()


def test_text_survives_encode_and_decode_and_special_tokens_are_added_and_shown_only_when_asked(tmp_path: Path) -> None:
    tokenizer = Tokenizer(make_folder(tmp_path))
    ids = tokenizer.encode("hello world 12")
    assert (ids.dtype, ids.tolist()) == (np.int32, [4, 5, 6])
    assert tokenizer.decode(ids) == "hello world 12"
    assert tokenizer.encode("hello", special_tokens=True).tolist() == [2, 4]
    ids = np.array([2, 4, 3], np.int32)
    assert tokenizer.decode(ids) == "hello"
    assert tokenizer.decode(ids, special_tokens=True) == "<s> hello <end>"
    assert tokenizer.encode("").shape == (0,)
    assert tokenizer.decode(np.empty(0, np.int32)) == ""
    assert tokenizer.vocab_size == len(WORDS), "the tokenizer's without a model config"


def test_a_text_that_begins_with_the_begin_token_gets_no_second_one(tmp_path: Path) -> None:
    tokenizer = Tokenizer(make_folder(tmp_path))
    for encode in (tokenizer.encode, tokenizer.encode_aside):
        assert encode("<s> hello", special_tokens=True).tolist() == [2, 4]
        assert encode("<s> <s> hello", special_tokens=True).tolist() == [2, 2, 4]
        assert encode("hello <s>", special_tokens=True).tolist() == [2, 4, 2]
        assert encode("<s> hello").tolist() == [2, 4]
        assert encode("", special_tokens=True).tolist() == [2]


def test_an_end_token_that_the_tokenizer_adds_does_not_end_a_context(tmp_path: Path) -> None:
    file = make_folder(tmp_path) / "tokenizer.json"
    made = tokenizers.Tokenizer.from_file(str(file))
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A <end>", special_tokens=[("<s>", 2), ("<end>", 3)]
    )
    made.save(str(file))
    tokenizer = Tokenizer(tmp_path)
    for encode in (tokenizer.encode, tokenizer.encode_aside):
        assert encode("hello", special_tokens=True).tolist() == [2, 4]
        assert encode("hello <end>", special_tokens=True).tolist() == [2, 4, 3]


def test_half_a_character_is_refused_by_its_place(tmp_path: Path) -> None:
    tokenizer = Tokenizer(make_folder(tmp_path))
    for encode in (tokenizer.encode, tokenizer.encode_aside):
        with pytest.raises(DataError, match="character 6 is half of a surrogate pair, not a valid character"):
            encode("hello \ud83d")


def test_an_id_in_the_padding_of_the_embedding_decodes_to_nothing_and_one_beyond_it_is_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer(make_folder(tmp_path, config={"vocab_size": 32}))
    for bad in (-1, 32, 2**31 - 1):
        with pytest.raises(DataError, match=rf"token_ids\[1\]: id {bad} is outside the vocabulary \[0, 32\)"):
            tokenizer.decode([4, bad])
    assert tokenizer.vocab_size == 32
    assert tokenizer.decode([4, 31]) == "hello"
    with pytest.raises(DataError, match="id 6 is outside"):
        Tokenizer(make_folder(tmp_path, config={"vocab_size": 6})).encode("hello 12")


@pytest.mark.parametrize(
    ("settings", "generation", "config", "expected"),
    [
        (None, None, None, ()),
        ({"eos_token": "<end>"}, None, None, (3,)),
        ({"eos_token": {"content": "<end>"}}, None, None, (3,)),
        (None, {"eos_token_id": [9, 3]}, {"eos_token_id": 5}, (3, 9)),
        (None, {"eos_token_id": 0}, None, (0,)),
        (None, {"temperature": 1.0}, {"eos_token_id": 5}, (5,)),
        ({"eos_token": "<end>"}, {"eos_token_id": 9}, None, (3, 9)),
        (None, None, {"text_config": {"eos_token_id": 7, "vocab_size": 20}}, (7,)),
    ],
)
def test_eos_ids_come_from_generation_config_then_config_and_the_tokenizer(
    tmp_path: Path, settings: Any, generation: Any, config: Any, expected: tuple[int, ...]
) -> None:
    folder = make_folder(tmp_path, settings=settings, generation=generation, config=config)
    assert Tokenizer(folder).eos_token_ids == expected


@pytest.mark.parametrize("named", ["<end>", [3, "<end>"], {"id": 3}, 3.5])
def test_an_end_token_that_is_no_id_is_refused_by_name(tmp_path: Path, named: object) -> None:
    with pytest.raises(DataError, match=r"eos_token_id=.* must be a token id, or a list of them"):
        Tokenizer(make_folder(tmp_path, generation={"eos_token_id": named}))


def test_the_content_follows_tokens_template_and_ends(tmp_path: Path) -> None:
    settings: list[tuple[dict[str, Any], Any]] = [
        ({}, None),
        ({"chat_template": TEMPLATE}, None),
        ({"chat_template": TEMPLATE, "bos_token": "<s>"}, None),
        ({"chat_template": TEMPLATE}, {"eos_token_id": [3, 9]}),
    ]
    contents = []
    for number, (tokenizer, generation) in enumerate(settings):
        folders = [make_folder(tmp_path / f"{number}{c}", settings=tokenizer, generation=generation) for c in "ab"]
        first, second = (Tokenizer(folder).content for folder in folders)
        assert first == second
        contents.append(first)
    assert len(set(contents)) == len(settings)
    sha = hashlib.sha256((tmp_path / "0a" / "tokenizer.json").read_bytes()).hexdigest()[:16]
    assert contents[0].startswith(f"tokenizer {sha}, ")
    assert contents[3].endswith(", end tokens 3 9")


MESSAGES = [{"role": "user", "content": " hello "}, {"role": "assistant", "content": "world"}]


def test_a_chat_is_rendered_as_transformers_renders_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    settings = {
        "eos_token": "<end>",
        "chat_template": TEMPLATE,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    folder = make_folder(tmp_path, settings=settings)
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer = Tokenizer(folder)
    expected = reference.apply_chat_template(MESSAGES[:1], add_generation_prompt=True, return_dict=False)
    assert tokenizer.render_chat(MESSAGES[:1]).tolist() == expected
    expected = reference.apply_chat_template(MESSAGES, continue_final_message=True, return_dict=False)
    assert tokenizer.render_chat(MESSAGES).tolist() == expected


def test_generation_tags_and_json_render_their_content_and_the_date_is_always_the_same(tmp_path: Path) -> None:
    dated = "{{ messages[0].content if strftime_now('%d %b %Y %H:%M') == '26 Jul 2024 00:00' }}"
    assert rendered(tmp_path, dated) == [4]
    named = [{"name": "tool_use", "template": "12"}, {"name": "default", "template": "{{ messages[0].content }}"}]
    assert rendered(tmp_path, named) == [4]
    template = "{% generation %}{{ messages[0].content }}{% endgeneration %} {{ {'a<b': 'ü'} | tojson }}"
    assert rendered(tmp_path, template) == Tokenizer(tmp_path).encode('hello {"a<b": "ü"}').tolist()
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }} {{ m.content }}{% endfor %}")
    assert rendered(tmp_path, template) == [4, 4], "the file wins over the settings"


@pytest.mark.parametrize(
    ("template", "message", "expected"),
    [
        (TEMPLATE, {"role": "tool", "content": "x"}, "no tools here"),
        ("{{ messages[0].content.__class__.__mro__ }}", {"role": "user", "content": "x"}, "unsafe"),
        ("{% if %}", {"role": "user", "content": "x"}, "refuses the messages"),
    ],
)
def test_a_template_that_refuses_or_reaches_out_is_a_data_error(
    tmp_path: Path, template: str, message: dict[str, str], expected: str
) -> None:
    folder = make_folder(tmp_path, settings={"chat_template": template})
    with pytest.raises(DataError, match=expected):
        Tokenizer(folder).render_chat([message])


THINKING = (
    "{% for m in messages %}{{ m.content }} {% endfor %}"
    "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}world{% endif %}"
)


def test_variables_reach_the_template_as_transformers_passes_them(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    settings = {"chat_template": THINKING, "tokenizer_class": "PreTrainedTokenizerFast"}
    folder = make_folder(tmp_path, settings=settings)
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    rendered = []
    for variables in ({}, {"enable_thinking": True}, {"enable_thinking": False}):
        expected = reference.apply_chat_template(
            MESSAGES[:1], add_generation_prompt=True, return_dict=False, **variables
        )
        rendered.append(Tokenizer(folder).render_chat(MESSAGES[:1], variables=variables).tolist())
        assert rendered[-1] == expected
    assert rendered[0] == rendered[1] != rendered[2]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "enable_thinkin",
            "kwargs.enable_thinkin: the chat template of .* reads no such variable; it reads enable_thinking",
        ),
        ("messages", "kwargs.messages: set by rollmesh itself; leave it out"),
        ("eos_token", "kwargs.eos_token: set by rollmesh itself"),
    ],
)
def test_a_variable_that_the_template_does_not_read_is_refused(tmp_path: Path, name: str, expected: str) -> None:
    tokenizer = Tokenizer(make_folder(tmp_path, settings={"chat_template": THINKING}))
    tokenizer.check_template_variables(["enable_thinking"], "kwargs")
    with pytest.raises(DataError, match=expected):
        tokenizer.check_template_variables(["enable_thinking", name], "kwargs")


def test_a_chat_without_a_template_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no chat template; add chat_template.jinja, or write plain texts: chat: false"):
        Tokenizer(make_folder(tmp_path)).render_chat(MESSAGES)


def test_a_missing_or_torn_tokenizer_or_config_is_refused_by_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tokenizer\.json: No such file"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer\.json: not a tokenizer"):
        Tokenizer(tmp_path)
    make_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(DataError, match=r"config\.json: not valid JSON"):
        Tokenizer(tmp_path)


def test_pieces_are_the_text_of_each_token_and_together_the_whole(tmp_path: Path) -> None:
    tokenizer = Tokenizer(make_folder(tmp_path))
    assert tokenizer.pieces([2, 4, 5, 3]) == ["<s>", " hello", " world", " <end>"]
    assert tokenizer.pieces([]) == []
    with pytest.raises(DataError, match="outside the vocabulary"):
        tokenizer.pieces([999])


def test_a_character_of_many_tokens_belongs_to_the_one_that_completes_it(tmp_path: Path) -> None:
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE({c: i for i, c in enumerate(tokenizers.pre_tokenizers.ByteLevel.alphabet())}, [])
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    pieces = tokenizer.pieces(tokenizer.encode("aé→b"))
    assert pieces == ["a", "", "é", "", "", "→", "b"]
