"""Language of chat templates: jinja as transformers compiles it, in a sandbox, with the tag of answers."""

import json
import re
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

TAG_VARIABLES = {"generation_begin": "\x02", "generation_end": "\x03"}
"""Variables that the tag {% generation %} prints around its body; nothing unless the spans are wanted."""
Span = tuple[int, int]
"""Part of a text: its characters from the first number to before the second."""

_TODAY = datetime(2024, 7, 26)
"""Date for templates that print one, the default of those of Llama 3: a prompt must not depend on the day."""


def split_tagged(rendered: str) -> tuple[str, list[Span]]:
    """Return a text without what the tags print, and the spans between them."""
    plain, spans, begin = "", [], 0
    for piece in re.split("([\x02\x03])", rendered):
        if piece == "\x02":
            begin = len(plain)
        elif piece == "\x03":
            spans.append((begin, len(plain)))
        else:
            plain += piece
    return plain, spans


class _GenerationTag(Extension):
    """Template tag ``{% generation %}`` around the text of answers."""

    tags = {"generation"}  # noqa: RUF012  (an instance attribute to mypy, a class attribute to jinja)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (nodes.Output([nodes.Name(name, "load")], lineno=line) for name in TAG_VARIABLES)
        return [begin, nodes.Scope(body, lineno=line), end]


def template_environment() -> ImmutableSandboxedEnvironment:
    """Return the environment that compiles chat templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _TODAY.strftime
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    # Templates print tool schemas for a model: jinja's own filter would escape HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
