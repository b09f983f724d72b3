"""YAML in which no key is written twice. YAML forbids it; the parser does not check, and its last value would win."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml


class DuplicateKeys(yaml.YAMLError):
    """A mapping has a key more than once."""


def parse_yaml(text: str) -> Any:
    """Parse one document. Raises yaml.YAMLError; of these DuplicateKeys names every repeated key with its lines."""
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        repeated = list(_repeated_keys(loader, node, (), set()))
        if repeated:
            raise DuplicateKeys("; ".join(repeated))
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _repeated_keys(loader: yaml.SafeLoader, node: yaml.Node, path: tuple[str, ...], seen: set[int]) -> Iterator[str]:
    """Sentences about the keys that are repeated in a node or inside it; ``path`` are the keys that lead to it."""
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
                # Keys are compared as values: true and yes are one key. A merge key has none.
                name = key.value if key.tag.endswith(":merge") else loader.construct_object(key)
                lines.setdefault(name, []).append(key.start_mark.line + 1)
                yield from _repeated_keys(loader, value, (*path, key.value), seen)
        for name, places in lines.items():
            if len(places) > 1:
                where = " and ".join(map(str, places))
                yield f"{'.'.join((*path, str(name)))} is set more than once, in lines {where}"
