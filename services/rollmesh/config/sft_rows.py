"""Form of the rows of supervised fine-tuning."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from rollmesh.config.methods import check_plain
from rollmesh.config.section import Section


class RowOptions(Section):
    """Fields of a row: those of a prompt and a response, or messages."""

    prompt_field: str = Field(default="prompt", min_length=1)
    """Field with the text of the prompt, which is not trained on."""
    response_field: str = Field(default="response", min_length=1)
    """Field with the text that is trained on."""
    messages_field: str = Field(default="messages", min_length=1)
    """Field with the messages of a chat; a row that has it is a chat. The assistant's messages are trained on."""
    tools_field: str = Field(default="tools", min_length=1)
    """Field with the tools of a chat in OpenAI's format, or their JSON text; a row may lack it."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables for the tokenizer's chat template, as data.chat_template_kwargs of a run."""
    too_long: Literal["error", "drop"] = "error"
    """A row longer than the context is an error, or dropped and counted."""

    @field_validator("chat_template_kwargs")
    @classmethod
    def _variables_are_plain(cls, variables: dict[str, Any]) -> dict[str, Any]:
        check_plain(variables, "chat_template_kwargs")
        return variables
