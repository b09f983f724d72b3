"""Chat templates: every message is in the text or is refused by number and role, and a begun answer is continued."""

from pathlib import Path
from typing import Any

import pytest
from jinja2 import Environment

from rollmesh.chat_template import ChatTemplate
from rollmesh.errors import DataError

QWEN = """{%- if messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% else %}<|im_start|>system
You are a helpful assistant.<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% elif message.role == 'assistant' %}<|im_start|>assistant
{{ message.content.split('</think>')[-1].lstrip('\\n') }}
{%- for call in message.tool_calls %}<tool_call>{{ (call.function or call) | tojson }}</tool_call>{% endfor %}<|im_end|>
{% elif message.role == 'tool' %}<|im_start|>user
<tool_response>{{ message.content }}</tool_response><|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
ALTERNATING = """{% for m in messages %}
{%- if m.role not in ('user', 'assistant') %}{{ raise_exception('no ' + m.role) }}{% endif %}
{{- '[' }}{{ m.role }}]{{ m.content | trim | upper }}{% endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}"""
HEAD = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
USER = {"role": "user", "content": "2 + 2?"}


def text(messages: list[dict[str, Any]], template: str = QWEN) -> str:
    return ChatTemplate(template, Path("model"), {}).text(messages, {})


def say(role: str, content: str, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


@pytest.mark.parametrize(
    ("messages", "at"),
    [
        ([say("User", "What is 4 + 4?")], r"message 0 \(role 'User'\): its content"),
        ([say("human", "hi")], r"message 0 \(role 'human'\): its content"),
        # Another message has the same words.
        ([say("User", "2"), USER], r"message 0 \(role 'User'\): its content"),
        ([USER, say("function", "4"), USER], r"message 1 \(role 'function'\): its content"),
        ([USER, say("assistant", "4", reasoning_content="easy"), USER], r"message 1 .*: its reasoning_content would"),
        (
            [USER, say("assistant", "", tool_calls=[{"name": "add", "arguments": {}}])],
            r"message 1 \(role 'assistant'\): a prompt cannot end with tool calls",
        ),
    ],
)
def test_a_message_that_the_template_would_lose_is_refused_by_number_and_role(
    messages: list[dict[str, Any]], at: str
) -> None:
    with pytest.raises(DataError, match=at):
        text(messages)


@pytest.mark.parametrize("arguments", [{"a": 2}, '{"a": 2}', "not JSON", {}, None])
def test_tool_calls_that_the_template_would_lose_are_refused(arguments: Any) -> None:
    call = {"type": "function", "id": "c1", "function": {"name": "add", "arguments": arguments}}
    messages = [USER, say("assistant", "", tool_calls=[call]), say("tool", "4")]
    assert '"name": "add"' in text(messages)
    for template in (QWEN.replace("tojson", "length"), QWEN.replace("(call.function or call) | tojson", "'call'")):
        with pytest.raises(DataError, match=r"message 1 \(role 'assistant'\): its tool call 0 would not be in the"):
            text(messages, template)


@pytest.mark.parametrize("arguments", [{"a": 2}, '{"a": 2}'])
def test_a_template_gets_arguments_in_the_form_that_it_takes(arguments: Any) -> None:
    call = {"function": {"name": "add", "arguments": arguments}}
    messages = [USER, say("assistant", "", tool_calls=[call]), say("tool", "4")]
    whole = "(call.function or call) | tojson"
    assert '"arguments": {"a": 2}' in text(messages)
    assert '<tool_call>{"name": "add"}</tool_call>' in text(
        [USER, say("assistant", "", tool_calls=[{"name": "add"}]), USER]
    )
    items = "call.function.name }}{% for k, v in call.function.arguments | items %}{{ k }}={{ v }};{% endfor %}{{ ''"
    assert "<tool_call>adda=2;</tool_call>" in text(messages, QWEN.replace(whole, items))
    joined = "call.function.name + call.function.arguments"
    assert '<tool_call>add{"a": 2}</tool_call>' in text(messages, QWEN.replace(whole, joined))


def test_a_part_of_a_tool_call_or_of_a_text_is_not_enough() -> None:
    call = {"function": {"name": "add", "arguments": {"a": 2}}}
    messages = [USER, say("assistant", "", tool_calls=[call]), say("tool", "4")]
    with pytest.raises(DataError, match="its tool call 0"):
        text(messages, QWEN.replace("(call.function or call) | tojson", "call.function.name"))
    with pytest.raises(DataError, match=r"message 0 \(role 'user'\): its content"):
        text([say("user", "a long question")], "{{ messages[0].content | truncate(8, True, '') }}")


def test_a_template_that_rewrites_a_text_still_contains_it() -> None:
    assert text([say("user", " hi ")], ALTERNATING) == "[user]HI[assistant]"
    # Templates of thinking models leave out the thoughts of earlier answers.
    assert "<think>" not in text([USER, say("assistant", "<think>\nhm</think>\n4"), USER])
    for options in ("", "(ensure_ascii=False)", "(indent=2, separators=(',', ':'))"):
        as_json = f"{{% for m in messages %}}{{{{ m.content | tojson{options} }}}}{{% endfor %}}"
        assert text([say("user", 'say "hü"\n')], as_json) == '"say \\"hü\\"\\n"'


def test_a_developer_is_the_system_of_a_template_that_knows_no_developer() -> None:
    messages = [say("developer", "Answer in one word."), say("user", "Capital of Peru?")]
    as_system = [say("system", "Answer in one word."), messages[1]]
    assert text(messages) == text(as_system)
    assert "Answer in one word." in text(messages)
    elsewhere = "{# the developer of the tools #}" + QWEN
    assert text(messages, elsewhere) == text(as_system)
    knows = QWEN.replace("message.role == 'user'", "message.role in ('user', 'developer')")
    assert "<|im_start|>developer\nAnswer in one word.<|im_end|>" in text(messages, knows)
    with pytest.raises(DataError, match=r"refuses the messages .*: no system \(messages of the role 'developer' are"):
        text(messages, ALTERNATING)


@pytest.mark.parametrize("begun", ["The sum is", "The sum is ", ""])
def test_an_answer_that_the_messages_begin_is_continued(begun: str) -> None:
    expected = f"{HEAD}<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n{begun}"
    assert text([USER, say("assistant", begun)]) == expected
    # The same words earlier in the conversation are not the end of the prompt.
    assert text([say("user", "The sum is"), say("assistant", "The sum is")]).endswith("assistant\nThe sum is")


def test_a_begun_thought_that_the_template_would_drop_is_refused() -> None:
    begun = say("assistant", "<think>\nEasy.\n</think>\n\nThe sum is")
    with pytest.raises(
        DataError, match=r"message 1 \(role 'assistant'\): the beginning of its content would not be in"
    ):
        text([USER, begun])
    keeps = QWEN.replace(".split('</think>')[-1].lstrip('\\n')", ".replace('\\n\\n', '\\n')")
    assert keeps != QWEN
    assert text([USER, begun], keeps).endswith("<think>\nEasy.\n</think>\nThe sum is")


def test_a_template_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    real = Environment.compile
    monkeypatch.setattr(Environment, "compile", lambda *args, **named: compiled.append(1) or real(*args, **named))
    template = ChatTemplate(QWEN, Path("model"), {})
    for number in range(50):
        template.text([say("user", f"{number} + 1?")], {"think": False})
    assert len(compiled) == 1
