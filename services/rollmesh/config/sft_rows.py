"""Form of the rows of supervised fine-tuning."""

from __future__ import annotations

from pydantic import Field

from rollmesh.config.section import Section


class RowOptions(Section):
    """Fields of a row."""

    prompt_field: str = Field(default="prompt", min_length=1)
    """Field with the text of the prompt, which is not trained on."""
    response_field: str = Field(default="response", min_length=1)
    """Field with the text that is trained on."""
