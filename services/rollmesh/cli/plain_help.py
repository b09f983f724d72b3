"""Help pages in the words of the command line: no types of Python, and arguments as they are typed."""

from __future__ import annotations

from functools import partial
from typing import Any

from typer.core import TyperGroup

_TYPES = {"int": "N", "float": "N", "path": "PATH", "str": "TEXT"}


class PlainGroup(TyperGroup):
    """Group whose commands print plain help pages."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command by name, its parameters with plain types."""
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            for param in command.get_params(ctx):
                _make_plain(param)
        return command

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters of the group with plain types."""
        params = super().get_params(ctx)
        for param in params:
            _make_plain(param)
        return params


def _make_plain(param: Any) -> None:
    # Attributes of the instance: typer offers no setting, and a version that does not read them ignores them.
    vars(param)["display_type_rich"] = partial(_display_type, param)
    if param.param_type_name == "argument":
        vars(param)["get_usage_pieces"] = partial(_usage_pieces, param)


def _display_type(param: Any, ctx: Any) -> str | None:
    """Return the placeholder of an option's value; None for flags, and for arguments, whose name says it."""
    if param.param_type_name == "argument" or getattr(param, "is_flag", False):
        return None
    if param.metavar is not None:
        return str(param.metavar)
    kind = str(param.display_type(ctx)).strip("<>").removeprefix("list[").removesuffix("]")
    return _TYPES.get(kind.split(" ")[0], kind.upper())


def _usage_pieces(param: Any, ctx: Any) -> list[str]:
    name = str(param.metavar or param.name.upper())
    many = "" if param.nargs == 1 else "..."
    return [f"{name}{many}" if param.required else f"[{name}{many}]"]
