"""Binder of a user's code, which a run file names as ``module:attribute``: found, its signature and results checked."""

import importlib
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollmesh.errors import ConfigError, DataError, RollmeshError
from rollmesh.file_writes import writing

CODE_FOLDER = "ROLLMESH_CODE_FOLDER"
"""Environment variable with the folder of the run file, for the services of the run and their processes."""
_RECORD = "code-folder"
_PATHS = sysconfig.get_paths()
_INSTALLED = (_PATHS["purelib"], _PATHS["platlib"])
_NEVER_OWN = (str(Path(__file__).parent) + os.sep, "<frozen ")


def _recorded(record: Path) -> str:
    # The name of a folder may be any bytes.
    return record.read_text(encoding="utf-8", errors="surrogateescape")


@contextmanager
def own_code(where: str, kind: type[RollmeshError] = DataError) -> Iterator[None]:
    """Turn an exception of a user's code into ``kind``, a final error with ``where``, the file and the line.

    A restart of the service would meet the same error. Errors of rollmesh pass.
    """
    try:
        yield
    except RollmeshError:
        raise
    except (Exception, SystemExit) as error:
        raise kind(f"{where}: raised {described(error)}") from error


def described(error: BaseException) -> str:
    """Return the class and the text of an error, with the file and the line of the user's code that raised it."""
    place = _place_of(error)
    words = f"{type(error).__name__}: {error}".encode("utf-8", "backslashreplace").decode()
    return words + (f" ({place})" if place else "")


def _place_of(error: BaseException) -> str:
    """Return ``file:line`` of the user's code: the innermost frame outside libraries, or the first of a library."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    outside = [place for place in frames if not place[0].startswith(_NEVER_OWN)]
    standard = (_PATHS["stdlib"], _PATHS["platstdlib"])
    own = [place for place in outside if not place[0].startswith((*_INSTALLED, *standard))]
    installed = [place for place in outside if place[0].startswith(_INSTALLED)]
    for found in (*own[-1:], *installed[:1]):
        return f"{found[0]}:{found[1]}"
    return ""


def search_beside(run_file: Path) -> None:
    """Let this process and those that it starts find modules beside the run file.

    For the copy in a run folder that is the run file from which the run was started, if its folder is recorded.
    """
    folder = run_file.resolve().parent
    record = folder / _RECORD
    os.environ[CODE_FOLDER] = _recorded(record) if record.exists() else str(folder)


def record_code_folder(run_folder: Path) -> None:
    """Record the folder of the run file in the run folder, for ``search_beside``; it stays as it is if none is set."""
    record, folder = run_folder / _RECORD, os.environ.get(CODE_FOLDER)
    # Services that start at once record the same folder: none of them empties the file that another one reads.
    if folder and not (record.exists() and _recorded(record) == folder):
        with writing(record):
            record.write_text(folder, encoding="utf-8", errors="surrogateescape")


def load_target(target: str, field: str) -> Any:
    """Import ``module:attribute``; error messages name ``field``, its field in the run file.

    The folder of the run file and the working directory, where ``rollmesh up`` was started, are searched for modules
    that are not installed.
    Raises ConfigError if the module or the attribute does not exist, or if the module raises an error.
    """
    module_name, separator, attribute = target.partition(":")
    if not separator or not module_name or not attribute:
        raise ConfigError(f"{field}: {target!r} must have the form module:name")
    with own_code(f"{field}: {target}", ConfigError):
        try:
            module = _import(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not (module_name == error.name or module_name.startswith(f"{error.name}.")):
                raise
            raise ConfigError(
                f"{field}: no module {error.name!r} (installed, on PYTHONPATH or in {' or '.join(_folders())}) for "
                f"{target!r}"
            ) from error
    try:
        return getattr(module, attribute)
    except AttributeError as error:
        raise ConfigError(f"{field}: module {module_name!r} has no {attribute!r}") from error


def call_target(found: Any, target: str, field: str, options: Mapping[str, Any], options_field: str) -> Any:
    """Call a user's class or function with its options. Raises ConfigError if it takes others, or raises an error."""
    if not callable(found):
        raise ConfigError(f"{field}: {target} is not callable")
    if problem := _problem_of_call(found, (), options):
        raise ConfigError(f"{options_field}: {target} rejects {dict(options)!r}: {problem}")
    with own_code(f"{field}={target}", ConfigError):
        return found(**options)


def load_function(
    target: str,
    field: str,
    inputs: tuple[str, ...],
    options: Mapping[str, Any],
    options_field: str = "",
    *,
    coroutine: bool = False,
) -> Callable[..., Any]:
    """Import a user's function (or coroutine function) of ``inputs``, which takes the options as keywords.

    Raises ConfigError, naming ``field``, if it does not exist or its signature does not fit. ``options_field`` is
    ``FIELD_options`` unless given.
    """
    function: Any = load_target(target, field)
    if not callable(function) or inspect.iscoroutinefunction(function) is not coroutine:
        kind = "an async function" if coroutine else "a plain function"
        raise ConfigError(f"{field}: {target} must be {kind} of ({', '.join(inputs)})")
    if problem := _problem_of_call(function, inputs, options):
        called = ", ".join((*inputs, f"**{options_field or f'{field}_options'}"))
        raise ConfigError(f"{field}: {target} cannot be called as f({called}): {problem}")
    found: Callable[..., Any] = function
    return found


def _problem_of_call(function: Any, inputs: tuple[str, ...], options: Mapping[str, Any]) -> str:
    try:
        inspect.signature(function).bind(*inputs, **options)
    except TypeError as error:
        return str(error)
    except ValueError:
        pass  # a function of a compiled library has no signature
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnFunction:
    """A user's function with its options. What it raises, and what does not fit, is an error of its field."""

    field: str
    target: str
    function: Callable[..., Any]
    options: Mapping[str, Any]
    problem: Callable[..., str]
    """Problem of a result, from the result and the inputs; empty without one."""

    def __call__(self, *inputs: Any) -> Any:
        """Call the function. Raises DataError, which names the field, the target, the file and the line."""
        with own_code(f"{self.field}={self.target}"):
            result = self.function(*inputs, **self.options)
        if problem := self.problem(result, *inputs):
            raise DataError(f"{self.field}={self.target}: returned {problem}")
        return result

    def declares(self, trait: str) -> bool:
        """Tell whether the user has set ``function.TRAIT = True``."""
        return bool(getattr(self.function, trait, False))


def _folders() -> list[str]:
    """Return the folders that are searched for modules that are not installed."""
    beside = os.environ.get(CODE_FOLDER)
    return list(dict.fromkeys(([beside] if beside else []) + [os.getcwd()]))


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        added = [folder for folder in _folders() if folder not in sys.path]
        if error.name != name.partition(".")[0] or not added:
            raise
        sys.path.extend(added)
        importlib.invalidate_caches()
        return importlib.import_module(name)
