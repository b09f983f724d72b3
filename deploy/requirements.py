"""Requirements of rollmesh's core and of extras, one a line, from pyproject.toml: the first packages of an image.

    requirements.py core tracing,datasets

Extras that name further extras of rollmesh are expanded. ``core`` are the dependencies without any extra.
"""

import re
import sys
import tomllib
from pathlib import Path

_EXTRAS_OF_OURS = re.compile(r"^rollmesh\[([\w,\s-]+)\]$")


def requirements(project: dict[str, object], names: list[str]) -> list[str]:
    """Return the requirement lines of the named extras, sorted; SystemExit names an extra that does not exist."""
    known = {"core": project["dependencies"], **project["optional-dependencies"]}  # type: ignore[dict-item]
    found: set[str] = set()
    todo, done = list(names), set()
    while todo:
        name = todo.pop()
        if name in done:
            continue
        done.add(name)
        if name not in known:
            raise SystemExit(f"{name} is no extra of rollmesh: expected {', '.join(known)}")
        for line in known[name]:  # type: ignore[attr-defined]
            ours = _EXTRAS_OF_OURS.match(line)
            if ours:
                todo += [extra.strip() for extra in ours[1].split(",")]
            else:
                found.add(line)
    return sorted(found)


def main() -> None:
    """Print the requirements of the extras named on the command line."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = [name for word in sys.argv[1:] for name in word.split(",") if name]
    print("\n".join(requirements(project, names)))


if __name__ == "__main__":
    main()
