"""YAML of run files: the numbers of YAML 1.2, no duplicate keys, and text where a field takes nothing else.

PyYAML reads YAML 1.1: ``1e-7`` is text, ``12:30`` is 750, ``2024-07-26`` is a date, which no option takes. YAML
forbids duplicate keys, but PyYAML keeps the last value without an error.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel

_INT, _FLOAT, _NULL, _TEXT, _DATE = (
    f"tag:yaml.org,2002:{name}" for name in ("int", "float", "null", "str", "timestamp")
)
_NUMBERS = {
    _INT: re.compile(r"[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0[0-7_]*|[1-9][0-9_]*)$"),
    _FLOAT: re.compile(
        r"(?:[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+)"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
}


class DuplicateKeys(yaml.YAMLError):
    """Error for a mapping with duplicate keys."""


class _Loader(yaml.SafeLoader):
    """Reader with the numbers of YAML 1.2, and no dates."""


class _Dumper(yaml.SafeDumper):
    """Writer that quotes the texts which a reader of either version takes for numbers."""


_Loader.yaml_implicit_resolvers = {
    first: [resolver for resolver in resolvers if resolver[0] not in (*_NUMBERS, _DATE)]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}
for _tag, _pattern in _NUMBERS.items():
    for _kind in (_Loader, _Dumper):
        _kind.add_implicit_resolver(_tag, _pattern, list("-+.0123456789"))


def parse_yaml(text: str, model: type[BaseModel] | None = None, path: Sequence[str] = ()) -> Any:
    """Parse one document, the value at ``path`` of ``model``; fields that take only text have their text.

    Raises yaml.YAMLError, or its subclass DuplicateKeys with all repeated keys and lines.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        repeated = list(_repeated_keys(loader, node, (), set()))
        if repeated:
            raise DuplicateKeys("; ".join(repeated))
        if model is not None:
            _keep_text(node, model, tuple(path))
        return loader.construct_document(node)
    finally:
        loader.dispose()


def dump_yaml(data: Any) -> str:
    """Write a document that ``parse_yaml`` reads back as it is."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False)


def field_value(model: type[BaseModel], keys: Sequence[str], text: str) -> Any:
    """Read the value of a field from a command line or a variable. Raises yaml.YAMLError.

    A field that takes only text takes it as it is, without quotes around it: ``::`` is an address, not a mapping.
    """
    kinds = _kinds(model, keys)
    if not _is_text(kinds):
        return parse_yaml(text, model, keys)
    stripped = text.strip()
    if stripped[:1] in ("'", '"'):
        with suppress(yaml.YAMLError):
            return parse_yaml(stripped)
    return None if NoneType in kinds and stripped in ("", "null", "~") else stripped


def _is_text(kinds: set[Any]) -> bool:
    return str in kinds and kinds <= {str, NoneType}


def _kinds(annotation: Any, keys: Sequence[str]) -> set[Any]:
    """Return the types of the values that a field takes; empty for an unknown one."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kinds(arguments[0], keys)
    if origin in (Union, UnionType):
        return {kind for argument in arguments for kind in _kinds(argument, keys)}
    if not keys:
        return {type(value) for value in arguments} if origin is Literal else {origin or annotation}
    if origin is dict:
        return _kinds(arguments[1], keys[1:])
    if isinstance(annotation, type) and issubclass(annotation, BaseModel) and keys[0] in annotation.model_fields:
        return _kinds(annotation.model_fields[keys[0]].annotation, keys[1:])
    return set()


def _keep_text(node: yaml.Node, model: type[BaseModel], path: tuple[str, ...]) -> None:
    """Mark as text what a run file has without quotes in a field that takes only text, such as ``name: 2024``."""
    kinds = _kinds(model, path)
    if kinds and isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                _keep_text(value, model, (*path, key.value))
    elif isinstance(node, yaml.ScalarNode) and node.tag != _NULL and _is_text(kinds):
        node.tag = _TEXT


def _repeated_keys(loader: yaml.SafeLoader, node: yaml.Node, path: tuple[str, ...], seen: set[int]) -> Iterator[str]:
    """Describe the duplicate keys of a node and its descendants; ``path`` has the keys that lead to the node."""
    if id(node) in seen:  # an alias
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _repeated_keys(loader, item, (*path, str(index)), seen)
    elif isinstance(node, yaml.MappingNode):
        lines: dict[Any, list[int]] = {}
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                # Keys are compared as values: true and yes are the same key. A merge key has no value.
                name = key.value if key.tag.endswith(":merge") else loader.construct_object(key)
                lines.setdefault(name, []).append(key.start_mark.line + 1)
                yield from _repeated_keys(loader, value, (*path, key.value), seen)
        for name, places in lines.items():
            if len(places) > 1:
                where = " and ".join(map(str, places))
                yield f"{'.'.join((*path, str(name)))} is set more than once, in lines {where}"
