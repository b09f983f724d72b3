"""Methods that a run file names, with their options; ``rollmesh.curriculum`` and ``rollmesh.algorithms`` have them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from rollmesh.config.section import Section

_OWN = re.compile(r"[\w.]+:\w+")


class NoOptions(Section):
    """Options of a method without any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One named method: its options, where it comes from, and where it differs from there."""

    source: str
    options: type[Section] = NoOptions
    deviation: str = ""
    """Difference from the source; empty without one."""


def is_own(name: str) -> bool:
    """Tell whether a name is ``module:function`` of a user's code."""
    return _OWN.fullmatch(name) is not None


def check_name(name: str, methods: Mapping[str, Method]) -> str:
    """Return a known name or ``module:function``. Raises ValueError for any other."""
    if name not in methods and not is_own(name):
        raise ValueError(f"expected {', '.join(methods)}, or module:function of your code")
    return name


def complete_options(
    name: str, options: Mapping[str, Any], methods: Mapping[str, Method], field: str
) -> dict[str, Any]:
    """Return the options of a method with its defaults filled in; those of a user's code as they are.

    Raises ValueError, naming ``field``, for an unknown option, a value out of range, and a value for a user's code that
    batch files cannot record.
    """
    if is_own(name):
        check_plain(options, field)
        return dict(options)
    model = methods[name].options
    for option in options.keys() - model.model_fields.keys():
        known = ", ".join(model.model_fields) or "none"
        owners = [other for other, method in methods.items() if option in method.options.model_fields]
        belongs = f" ({option} belongs to {' and '.join(owners)})" if owners else ""
        raise ValueError(f"{field}.{option}: {name} has no such option{belongs}; its options: {known}")
    try:
        return model.model_validate(dict(options)).model_dump(mode="json")
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, (field, *first["loc"])))
        given = "" if first["type"] == "missing" else f"={first['input']!r}"
        raise ValueError(f"{place}{given} of {name}: {first['msg']}") from None


def check_plain(options: Mapping[str, Any], field: str) -> None:
    """Raise ValueError for a value that a file in JSON would change: infinity, a tuple, a date."""
    for option, value in options.items():
        try:
            kept = json.loads(json.dumps(value, allow_nan=False)) == value
        except (TypeError, ValueError):
            kept = False
        if not kept:
            raise ValueError(
                f"{field}.{option}={value!r}: expected finite numbers, strings, true, false, null, or lists and "
                "mappings of them"
            )
