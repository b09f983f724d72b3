"""Chat template of a model: messages to text, with a refusal of messages that the text would not contain.

It also finds the answers in the text of a whole conversation, for training on them.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from jinja2 import Template, TemplateError, meta

from rollmesh.errors import DataError
from rollmesh.template_language import TAG_VARIABLES, Span, split_tagged, template_environment

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]] | None
"""Tools of a chat in OpenAI's format."""

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
_RENDERED_VARIABLES = ("messages", "add_generation_prompt", "tools", "documents")
_OWN_NAMES = frozenset({*_RENDERED_VARIABLES, *SPECIAL_TOKEN_NAMES, *TAG_VARIABLES, "raise_exception", "strftime_now"})

_AS_SYSTEM = {"developer": "system"}
_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Fields in which data sets keep the thought of a message."""
_MARK = "7240918355160{:06d}"
"""Text that is appended to a part of a message to find it in the rendering: digits, which no template rewrites."""
_END = _MARK.format(999_999)
_Rendered = TypeVar("_Rendered")
_Render = Callable[[Sequence[Message], Mapping[str, Any]], _Rendered]


class ChatTemplate:
    """Chat template of one model folder, compiled once."""

    def __init__(self, source: str, folder: Path, special_tokens: Mapping[str, str]) -> None:
        """``source`` is empty for a model without a template."""
        self._source = source
        self._folder = folder
        self._special_tokens = special_tokens

    def text(self, messages: Sequence[Message], variables: Mapping[str, Any], tools: Tools = None) -> str:
        """Render messages ({role, content, ...} mappings), tools if given, and the beginning of the answer.

        An answer that the messages begin, as their last message, is continued. A template that knows no developer gets
        those messages as system messages. The arguments of tool calls are objects, or JSON text for a template that
        takes only that. Raises DataError if the model has no template, if the template refuses the messages, and if a
        message, its tool calls, its reasoning or the tools would not be in the text.
        """
        return self._in_any_form(messages, variables, tools, self._prompt)

    @property
    def marks_answers(self) -> bool:
        """True if the template has the tag {% generation %}."""
        return bool(self._source) and TAG_VARIABLES.keys() <= self._read_variables

    def conversation(self, messages: Sequence[Message], variables: Mapping[str, Any], tools: Tools = None) -> str:
        """Render a whole conversation; raises DataError as ``text`` does."""

        def checked(messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
            self._check_parts(messages, variables)
            return self._render(messages, variables, answer=False)

        return self._in_any_form(messages, variables, tools, checked)

    def answers(
        self, messages: Sequence[Message], variables: Mapping[str, Any], tools: Tools, ends: Sequence[str]
    ) -> list[Span]:
        """Return where the answers are in the text of a whole conversation.

        The spans are those of the tag {% generation %} where the template has it. Otherwise an answer begins where the
        prompt of the messages before it ends, and stops with the first of ``ends``, the texts of end tokens; the
        rendering of a changed answer shows that nothing else is in it, and no part of it elsewhere. Raises DataError
        where the spans cannot be found so.
        """

        def spans(messages: Sequence[Message], variables: Mapping[str, Any]) -> list[Span]:
            text = self._render(messages, variables, answer=False)
            if not self.marks_answers:
                answers = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
                return [self._span(text, messages, at, variables, ends) for at in answers]
            plain, found = split_tagged(self._render(messages, {**variables, **TAG_VARIABLES}, answer=False))
            if plain != text:
                raise DataError(f"{self._folder}: the chat template changes what is around {{% generation %}}")
            return found

        return self._in_any_form(messages, variables, tools, spans)

    def _in_any_form(
        self, messages: Sequence[Message], variables: Mapping[str, Any], tools: Tools, render: _Render[_Rendered]
    ) -> _Rendered:
        if tools and self._source and "tools" not in self._read_variables:
            raise DataError(f"the chat template of {self._folder} writes no tools")
        variables = {**variables, "tools": tools or None}
        if not any(message.get("tool_calls") for message in messages):
            return self._in_known_roles(messages, variables, render)
        try:
            return self._in_known_roles(_with_arguments(messages, _as_object), variables, render)
        except DataError:
            with suppress(DataError):
                return self._in_known_roles(_with_arguments(messages, _as_text), variables, render)
            raise

    def _in_known_roles(
        self, messages: Sequence[Message], variables: Mapping[str, Any], render: _Render[_Rendered]
    ) -> _Rendered:
        if not any(message["role"] == "developer" for message in messages):
            return render(messages, variables)
        if "developer" in self._source:
            with suppress(DataError):
                return render(messages, variables)
        try:
            return render([{**m, "role": _AS_SYSTEM.get(m["role"], m["role"])} for m in messages], variables)
        except DataError as error:
            raise DataError(f"{error} (messages of the role 'developer' are 'system' ones in this template)") from error

    def _prompt(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        last = messages[-1]
        is_begun = last["role"] == "assistant"
        if is_begun and last.get("tool_calls"):
            raise DataError(
                f"message {len(messages) - 1} (role 'assistant'): a prompt cannot end with tool calls; add the tool's "
                "message after them, or leave them out"
            )
        self._check_parts(messages, variables, begun=last if is_begun else None, answer=not is_begun)
        if not is_begun:
            return self._render(messages, variables)
        begun = {**last, "content": last["content"] + _END}
        text = self._render([*messages[:-1], begun], variables, answer=False).rpartition(_END)[0]
        # Templates may drop the thought of a begun answer, as of an earlier one; they may also set its spaces.
        if not "".join(text.split()).endswith("".join(last["content"].split())):
            raise self._lost(len(messages) - 1, "assistant", "the beginning of its content")
        return text

    def _check_parts(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any],
        *,
        begun: Message | None = None,
        answer: bool = False,
    ) -> None:
        places: dict[str, tuple[int, str]] = {}
        marked = [_marked(m, at, places, is_begun=m is begun) for at, m in enumerate(messages)]
        rendered = self._render(marked, variables, answer=answer)
        for mark, (number, part) in places.items():
            if mark not in rendered:
                raise self._lost(number, messages[number]["role"], part)

    def _span(
        self, text: str, messages: Sequence[Message], at: int, variables: Mapping[str, Any], ends: Sequence[str]
    ) -> Span:
        begin = self._render(messages[:at], variables)
        found = [(start, start + len(end)) for end in ends if (start := text.find(end, len(begin))) >= 0]
        if not found:
            raise DataError(
                f"message {at} (role 'assistant'): the chat template of {self._folder} writes none of the end tokens "
                f"of the model after it ({', '.join(map(repr, ends)) or 'there are none'}); add the one that it "
                "writes to eos_token_id in generation_config.json, or set another chat template"
            )
        stop = min(found)[1]
        marks: dict[str, tuple[int, str]] = {}
        changed = [*messages[:at], _marked(messages[at], at, marks, is_begun=False), *messages[at + 1 :]]
        rendered, rest = self._render(changed, variables, answer=False), text[stop:]
        inside = rendered.removeprefix(begin).removesuffix(rest)
        is_exact = (
            text.startswith(begin) and rendered == begin + inside + rest and all(mark in inside for mark in marks)
        )
        if not is_exact:
            raise DataError(
                f"message {at} (role 'assistant'): its begin and end cannot be found exactly in what the chat template "
                f"of {self._folder} writes; put {{% generation %}} and {{% endgeneration %}} around answers there"
            )
        return len(begin), stop

    def check_variables(self, names: Iterable[str], field: str) -> None:
        """Raise DataError for a variable that the template does not read, or that is not the caller's to set."""
        if not self._source:
            return
        for name in names:
            if name in _OWN_NAMES:
                raise DataError(f"{field}.{name}: set by rollmesh itself; leave it out")
            if name not in self._read_variables:
                known = ", ".join(sorted(self._read_variables - _OWN_NAMES)) or "none"
                raise DataError(
                    f"{field}.{name}: the chat template of {self._folder} reads no such variable; it reads {known}"
                )

    def _render(self, messages: Sequence[Message], variables: Mapping[str, Any], *, answer: bool = True) -> str:
        if not self._source:
            raise DataError(
                f"{self._folder}: the tokenizer has no chat template; add chat_template.jinja, or write plain texts: "
                "chat: false in a run, prompt and response in rows of rollmesh sft"
            )
        try:
            return self._compiled.render(
                {"tools": None, **variables},
                messages=[dict(m) for m in messages],
                add_generation_prompt=answer,
                documents=None,
                **self._special_tokens,
            )
        except (TemplateError, TypeError, ValueError) as error:
            roles = ", ".join(dict.fromkeys(repr(message["role"]) for message in messages))
            raise DataError(
                f"{self._folder}: the chat template refuses the messages (roles {roles}): {error}"
            ) from error

    def _lost(self, number: int, role: str, part: str) -> DataError:
        return DataError(
            f"message {number} (role {role!r}): {part} would not be in the prompt, because the chat template of "
            f"{self._folder} does not write it; use a role that the template knows (most know system, user and "
            "assistant), leave the part out, or set another chat template"
        )

    @cached_property
    def _compiled(self) -> Template:
        return template_environment().from_string(self._source)

    @cached_property
    def _read_variables(self) -> set[str]:
        try:
            return meta.find_undeclared_variables(template_environment().parse(self._source))
        except TemplateError as error:
            raise DataError(f"{self._folder}: the chat template is not valid: {error}") from error


def _marked(message: Message, number: int, places: dict[str, tuple[int, str]], *, is_begun: bool) -> Message:
    """Return a copy of a message with a mark in each part that the rendering must contain; a begun answer may be empty.

    ``places`` gets the number of the message and the name of the part, by mark.
    """

    def mark(part: str) -> str:
        found = _MARK.format(len(places))
        places[found] = number, part
        return found

    def marked_call(call: Message, part: str) -> Message:
        if isinstance(call.get("function"), Mapping):
            return {**call, "function": marked_call(call["function"], part)}
        copy = {**call, "name": f"{call.get('name')}{mark(part)}"}
        if call.get("arguments"):
            copy["arguments"] = _with_argument(call["arguments"], mark(part))
        return copy

    copy = dict(message)
    for name in ("content", *_REASONING):
        value = message.get(name)
        if isinstance(value, str) and (value.strip() or (is_begun and name == "content")):
            copy[name] = value + mark(f"its {name}")
    if message.get("tool_calls"):
        copy["tool_calls"] = [marked_call(call, f"its tool call {at}") for at, call in enumerate(message["tool_calls"])]
    return copy


def _with_argument(arguments: Any, mark: str) -> Any:
    """Add an argument to those of a tool call."""
    read = _as_object(arguments)
    if not isinstance(read, Mapping):
        return f"{arguments}{mark}"
    return _as_text({**read, "mark": mark}) if isinstance(arguments, str) else {**read, "mark": mark}


def _with_arguments(messages: Sequence[Message], form: Callable[[Any], Any]) -> list[Message]:
    """Write the arguments of all tool calls in one form; data sets have either."""

    def call_in_form(call: Message) -> Message:
        inner = {"function": call_in_form(call["function"])} if isinstance(call.get("function"), Mapping) else {}
        given = {"arguments": form(call["arguments"])} if "arguments" in call else {}
        return {**call, **inner, **given}

    return [
        {**message, "tool_calls": [call_in_form(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _as_object(arguments: Any) -> Any:
    try:
        read = json.loads(arguments)
    except (TypeError, ValueError):
        return arguments
    return read if isinstance(read, dict) else arguments


def _as_text(arguments: Any) -> Any:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, Mapping) else arguments
