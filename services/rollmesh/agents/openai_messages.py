"""Messages and tools of a chat request, and the base of every request: unknown fields are rejected unless empty."""

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from rollmesh.characters import half_character


def is_empty(value: Any) -> bool:
    """Tell whether a field says nothing: null, an empty value, or an object of such fields."""
    return all(each in (None, [], {}, "") for each in (value.values() if isinstance(value, dict) else (value,)))


def whole_characters(text: str) -> str:
    """Reject half of a surrogate pair: JSON can escape one, but it is not a valid character."""
    if problem := half_character(text):
        raise ValueError(problem)
    return text


_to_json = json.JSONEncoder(allow_nan=False, ensure_ascii=False).encode


def json_value(value: Any) -> Any:
    """Reject a number or a text that JSON cannot carry, anywhere in the value."""
    try:
        _to_json(value).encode()
    except UnicodeEncodeError as error:
        raise ValueError("a text in it has half of a surrogate pair, not a valid character") from error
    except RecursionError as error:
        raise ValueError("its lists and objects are nested too deeply") from error
    return value


Text = Annotated[str, AfterValidator(whole_characters)]
TemplateValue = Annotated[Any, AfterValidator(json_value)]


class Closed(BaseModel):
    """Request that rejects unknown fields, unless they are empty; its docstrings become the OpenAPI text."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_empty_fields(cls, data: Any) -> Any:
        """Drop fields that say nothing: a client sends them back with an answer, or for what it does not set."""
        if not isinstance(data, dict):
            return data
        known = cls.__pydantic_fields__
        if data.keys() <= known.keys() and None not in data.values():
            return data
        return {k: v for k, v in data.items() if v is not None and (k in known or not is_empty(v))}


class TextPart(Closed):
    """One part of a message's content."""

    type: Literal["text"]
    """Type of the part; only text is supported."""
    text: Text
    """The text."""
    cache_control: dict[str, Any] | None = None
    """Ignored: equal beginnings are always shared. (Not part of OpenAI's API.)"""


class CalledFunction(Closed):
    """Function of a tool call."""

    name: Text
    """Name of the function."""
    arguments: Text
    """Arguments as JSON text."""


class ToolCall(Closed):
    """Call of a tool, as an answer contained it."""

    id: Text
    """Id of the call, which the tool's message refers to."""
    type: Literal["function"] = "function"
    """Type of the tool; only functions are supported."""
    function: CalledFunction
    """The called function."""
    index: int | None = None
    """Ignored: the position of the call in the answer."""


class ToolFunction(Closed):
    """Function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    """Name of the function."""
    description: Text | None = None
    """Purpose of the function, for the model."""
    parameters: Annotated[dict[str, Any], AfterValidator(json_value)] | None = None
    """JSON schema of the arguments."""
    strict: bool | None = None
    """Ignored: the engine does not hold an answer to a schema."""


class Tool(Closed):
    """Tool that the model may call."""

    type: Literal["function"]
    """Type of the tool; only functions are supported."""
    function: ToolFunction
    """The function."""


class Message(Closed):
    """One chat message."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    """Author of the message."""
    content: Text | list[TextPart]
    """Text of the message. Null in an assistant message is an empty text."""
    name: Text | None = None
    """Name of the author, for chat templates that use it."""
    tool_calls: list[ToolCall] = Field(default_factory=list)
    """Calls of tools in an assistant message."""
    reasoning_content: Text | None = None
    """Thought of an assistant message, as its answer contained it."""
    reasoning: Text | None = None
    """Ignored: another name of reasoning_content."""
    provider_specific_fields: dict[str, Any] | None = None
    """Ignored: what a client library adds. (Not part of OpenAI's API.)"""
    invalid_tool_calls: list[dict[str, Any]] = Field(default_factory=list)
    """Ignored: what a client sends back of an answer whose calls could not be parsed. (Not part of OpenAI's API.)"""
    tool_call_id: Text | None = None
    """Id of the call that a tool message answers."""
    prefix: bool | None = None
    """Must be false, or true in an assistant message that ends the conversation. (Not part of OpenAI's API.)"""

    @model_validator(mode="before")
    @classmethod
    def _of_text(cls, data: Any) -> Any:
        """Refuse functions of the old API; null content of an assistant message is an empty text."""
        if not isinstance(data, dict):
            return data
        if not is_empty(data.get("function_call")):
            raise ValueError("function_call: not supported; send tool_calls")
        if not is_empty(data.get("tool_calls")) and data.get("role") != "assistant":
            raise ValueError(
                f"tool_calls: in a message of the role {data.get('role')!r}; only an assistant calls tools"
            )
        lacks_text = data.get("role") == "assistant" and data.get("content") is None
        return {**data, "content": ""} if lacks_text else data

    def as_template(self) -> dict[str, Any]:
        """Return the message as a chat template expects it: text content, without absent fields."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        optional = {
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content,
            "tool_calls": [call.model_dump(exclude={"index"}) for call in self.tool_calls] or None,
        }
        return {"role": self.role, "content": text, **{k: v for k, v in optional.items() if v is not None}}
