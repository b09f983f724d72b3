"""Request model of the Responses API; its items are translated into the messages of a chat."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator

from rollmesh.agents.openai_errors import invalid
from rollmesh.agents.openai_messages import Closed, Text, ToolFunction
from rollmesh.agents.openai_requests import (
    MOST_TOOLS,
    ChatRequest,
    ConversationRequest,
    Sampling,
    SamplingRequest,
    TokenCount,
    no_call,
)

_KINDS = ("message", "function_call", "function_call_output", "reasoning")
_SHARED = {*SamplingRequest.model_fields, *ConversationRequest.model_fields, *Sampling.model_fields}


class ItemText(Closed):
    """Text of an item."""

    type: Literal["input_text", "output_text", "summary_text", "reasoning_text"]
    """Type of the part; only text is supported."""
    text: Text
    """The text."""
    annotations: list[Any] = Field(default_factory=list)
    """Ignored."""
    logprobs: list[Any] = Field(default_factory=list)
    """Ignored."""


class ItemFields(Closed):
    """Fields common to all items."""

    id: Text | None = None
    """Ignored: the id that the item had in an answer."""
    status: Text | None = None
    """Ignored."""


class MessageItem(ItemFields):
    """Message of the conversation."""

    type: Literal["message"] = "message"
    """Type of the item."""
    role: Literal["system", "developer", "user", "assistant"]
    """Author of the message."""
    content: Text | list[ItemText]
    """Text of the message."""
    phase: Text | None = None
    """Ignored."""


class CallItem(ItemFields):
    """Call of a function, as an answer contained it."""

    type: Literal["function_call"]
    """Type of the item."""
    call_id: Text
    """Id of the call, which its result refers to."""
    name: Text
    """Name of the function."""
    arguments: Text
    """Arguments as JSON text."""


class ResultItem(ItemFields):
    """Result of a function call."""

    type: Literal["function_call_output"]
    """Type of the item."""
    call_id: Text
    """Id of the call."""
    output: Text | list[ItemText]
    """Text of the result."""


class ReasoningItem(ItemFields):
    """Thought of an answer."""

    type: Literal["reasoning"]
    """Type of the item."""
    summary: list[ItemText] = Field(default_factory=list)
    """Ignored: the thought is in content."""
    content: list[ItemText] = Field(default_factory=list)
    """Text of the thought."""
    encrypted_content: str | None = None
    """Ignored."""


def _kind(item: Any) -> str:
    return str((item.get("type") or "message") if isinstance(item, dict) else getattr(item, "type", "message"))


def _of_known_kind(item: Any) -> Any:
    if (kind := _kind(item)) not in _KINDS:
        raise ValueError(f"items of the type {kind!r} are not supported; send items of {', '.join(_KINDS)}")
    return item


# The tags are no identifiers, so that an error does not show them as parts of a field's name.
Item = Annotated[
    Annotated[MessageItem, Tag("item message")]
    | Annotated[CallItem, Tag("item function_call")]
    | Annotated[ResultItem, Tag("item function_call_output")]
    | Annotated[ReasoningItem, Tag("item reasoning")],
    Discriminator(lambda item: f"item {_kind(item)}"),
    BeforeValidator(_of_known_kind),
]


class FunctionTool(ToolFunction):
    """Function that the model may call."""

    type: Literal["function"]
    """Type of the tool; only functions are supported."""

    @model_validator(mode="before")
    @classmethod
    def _not_hosted(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("type", "function") != "function":
            raise ValueError(f"type {data['type']!r}: this server has no tools of its own; send functions")
        return data


class PlainFormat(Closed):
    """Format of the answer."""

    type: Literal["text"]
    """Must be text: the engine does not hold an answer to a schema."""


class TextOptions(Closed):
    """Options of the answer's text."""

    format: PlainFormat | None = None
    """Format of the answer."""
    verbosity: Literal["medium"] | None = None
    """Must be medium; ask for another one in a message."""


def _no_effort(_: str) -> str:
    raise ValueError("not supported; ask for it in a message")


class ReasoningOptions(Closed):
    """Options of thoughts."""

    summary: Text | None = None
    """Ignored: the whole thought is sent."""
    effort: Annotated[str, AfterValidator(_no_effort)] | None = None
    """Must be absent."""


class InputChat(ChatRequest):
    """Chat that a Responses request asks for."""

    context_field: ClassVar[str] = "input"

    @property
    def needs_texts(self) -> bool:
        return True  # the tokens of a thought are counted by their texts


class ResponsesRequest(ConversationRequest):
    """POST /v1/responses."""

    input: Text | Annotated[list[Item], Field(min_length=1)]
    """The conversation so far: a text of the user, or all of its items."""
    instructions: Text | None = None
    """Message of the system before the conversation."""
    tools: list[FunctionTool] = Field(default_factory=list, max_length=MOST_TOOLS)
    """Functions that the model may call."""
    max_output_tokens: TokenCount | None = None
    """Maximum tokens of the answer; defaults to the room left after the context."""
    include: list[Literal["reasoning.encrypted_content"]] = Field(default_factory=list)
    """Ignored: the text of a thought is always sent."""
    text: TextOptions | None = None
    """Options of the answer's text."""
    reasoning: ReasoningOptions | None = None
    """Options of thoughts."""
    truncation: Literal["disabled"] | None = None
    """Must be disabled: a conversation that is too long is refused."""
    n: Literal[1] | None = None
    """Must be 1."""

    def as_chat(self) -> InputChat:
        """Return the same call as a chat; the OpenAiError of a result without its call names the item."""
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        items = [MessageItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        tools = [{"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in self.tools]
        own = {
            "messages": [*messages, *_messages(items)], "tools": tools, "max_tokens": self.max_output_tokens
        }  # fmt: skip
        return InputChat.model_validate({**self.model_dump(include=_SHARED), **own})


def _messages(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Return items as messages; a thought, a text and calls that follow each other are one answer."""
    messages: list[dict[str, Any]] = []
    answer: dict[str, Any] | None = None
    waiting = set[str]()
    for number, item in enumerate(items):
        if isinstance(item, ResultItem):
            if item.call_id not in waiting:
                raise invalid(f"input.{number}.call_id: {no_call(item.call_id)}", f"input.{number}.call_id")
            waiting.remove(item.call_id)
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
            answer = None
        elif isinstance(item, MessageItem) and item.role != "assistant":
            messages.append({"role": item.role, "content": _text(item.content)})
            answer, waiting = None, set()
        else:
            if answer is None or _is_next(answer, item):
                answer, waiting = {"role": "assistant", "content": "", "tool_calls": []}, set()
                messages.append(answer)
            if isinstance(item, ReasoningItem):
                answer["reasoning_content"] = _text(item.content)
            elif isinstance(item, MessageItem):
                answer["content"] = _text(item.content)
            elif item.call_id in waiting:
                raise invalid(f"input.{number}.call_id: two calls have the same id", f"input.{number}.call_id")
            else:
                function = {"name": item.name, "arguments": item.arguments}
                answer["tool_calls"].append({"id": item.call_id, "type": "function", "function": function})
                waiting.add(item.call_id)
    return messages


def _is_next(answer: dict[str, Any], item: Item) -> bool:
    """Tell whether an item begins another answer than the one put together so far."""
    if isinstance(item, ReasoningItem):
        return bool(answer["content"] or answer["tool_calls"] or "reasoning_content" in answer)
    return isinstance(item, MessageItem) and bool(answer["content"])


def _text(content: str | Sequence[ItemText]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
