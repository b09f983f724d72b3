"""Methods that a run file names: one row per method, whose function is imported when a run uses it."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from rollmesh.config.section import Section
from rollmesh.user_code import OwnFunction, load_function, load_target

_OWN = re.compile(r"[\w.]+:\w+")


class NoOptions(Section):
    """Options of a method without any."""


@dataclass(frozen=True, slots=True)
class Method:
    """One named method: where it comes from, where it differs from there, its options, its function."""

    source: str
    _: KW_ONLY
    function: str | None = ""
    """Function of the inputs of its point, with its options as keywords: empty for one of the method's name, None for
    a method that needs none."""
    options: type[Section] = NoOptions
    deviation: str = ""
    """Difference from the source; empty without one."""
    example: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of a run file that uses it, for the reference pages and the runs of the demo."""


Row = TypeVar("Row", bound=Method)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point(Generic[Row]):
    """One field of a run file that names a method, and the rows that it may name."""

    field: str
    methods: Mapping[str, Row]
    inputs: tuple[str, ...] = ()
    """Positional inputs of its functions."""
    module: str = ""
    """Module of its functions; empty without any."""
    own: Row | None = None
    """Row assumed of a user's code; None if the field takes none."""

    def __getitem__(self, name: str) -> Row:
        """Return the row of a method, or that of a user's code. Raises KeyError for any other name."""
        return self.own if self.own is not None and is_own(name) else self.methods[name]

    def names(self, **traits: Any) -> list[str]:
        """Return the methods whose rows have these values."""
        rows = self.methods.items()
        return [name for name, row in rows if all(getattr(row, trait) == value for trait, value in traits.items())]

    def example(self, name: str) -> dict[str, Any]:
        """Return the fields of a run file that uses a method."""
        return {self.field: name, **self.methods[name].example}

    def target(self, name: str) -> str:
        """Return ``module:function`` of a method, as a run file names a user's code; empty if it needs none."""
        if is_own(name):
            return name
        function = self.methods[name].function
        return f"{self.module}:{function or name}" if self.module and function is not None else ""

    def check_name(self, name: str) -> str:
        """Return a known name or ``module:function``. Raises ValueError for any other."""
        if name not in self.methods and not is_own(name):
            raise ValueError(f"expected {', '.join(self.methods)}, or module:function of your code")
        return name

    def complete_options(self, name: str, options: Mapping[str, Any], options_field: str = "") -> dict[str, Any]:
        """Return the options of a method with its defaults filled in; those of a user's code as they are.

        Raises ValueError, naming ``options_field`` (``FIELD_options`` unless given), for an unknown option, a value out
        of range, and a value for a user's code that batch files cannot record.
        """
        where = options_field or f"{self.field}_options"
        if is_own(name):
            check_plain(options, where)
            return dict(options)
        model = self.methods[name].options
        for option in options.keys() - model.model_fields.keys():
            known = ", ".join(model.model_fields) or "none"
            owners = [other for other, method in self.methods.items() if option in method.options.model_fields]
            belongs = f" ({option} belongs to {' and '.join(owners)})" if owners else ""
            raise ValueError(f"{where}.{option}: {name} has no such option{belongs}; its options: {known}")
        try:
            return model.model_validate(dict(options)).model_dump(mode="json")
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, (where, *first["loc"])))
            given = "" if first["type"] == "missing" else f"={first['input']!r}"
            raise ValueError(f"{place}{given} of {name}: {first['msg']}") from None

    def bind(
        self,
        name: str,
        options: Mapping[str, Any],
        problem: Callable[..., str] = lambda *_: "",
        *,
        of_field: str = "",
        options_field: str = "",
    ) -> Callable[..., Any]:
        """Import the function of a method, and bind its options.

        ``problem`` says what is wrong with a result of a user's function, and gets its inputs too. ``of_field`` is the
        field in the run file where it is not that of the point. Raises ConfigError for code that cannot be called.
        """
        of_field = of_field or self.field
        options_field = options_field or f"{of_field}_options"
        complete = self.complete_options(name, options, options_field)
        if is_own(name):
            function = load_function(name, of_field, self.inputs, complete, options_field)
            return OwnFunction(field=of_field, target=name, function=function, options=complete, problem=problem)
        return partial(load_target(self.target(name), of_field), **complete)


def is_own(name: str) -> bool:
    """Tell whether a name is ``module:function`` of a user's code."""
    return _OWN.fullmatch(name) is not None


def check_plain(options: Mapping[str, Any], options_field: str) -> None:
    """Raise ValueError for a value that a file in JSON would change: infinity, a tuple, a date."""
    for option, value in options.items():
        try:
            kept = json.loads(json.dumps(value, allow_nan=False)) == value
        except (TypeError, ValueError):
            kept = False
        if not kept:
            raise ValueError(
                f"{options_field}.{option}={value!r}: expected finite numbers, strings, true, false, null, or lists "
                "and mappings of them"
            )


def listed(names: Sequence[str], last: str = "and") -> str:
    """Return ``a, b and c``."""
    return f" {last} ".join(filter(None, (", ".join(names[:-1]), names[-1])))
