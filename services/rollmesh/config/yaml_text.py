"""YAML parser that rejects duplicate keys. YAML forbids them, but PyYAML keeps the last value without an error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml


class DuplicateKeys(yaml.YAMLError):
    """Error for a mapping with duplicate keys."""


def parse_yaml(text: str) -> Any:
    """Parse one document; raises yaml.YAMLError, or its subclass DuplicateKeys with all repeated keys and lines."""
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
