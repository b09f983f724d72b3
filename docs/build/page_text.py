"""What all generated pages share: their folder, their templates, and the filters of a template."""

from pathlib import Path
from textwrap import fill

from jinja2 import Environment, FileSystemLoader

DOCS = Path(__file__).parents[1]


def templates(*, lstrip_blocks: bool = False) -> Environment:
    """Return the templates; their filter ``wrapped`` makes lines of at most 120 characters."""
    environment = Environment(
        loader=FileSystemLoader(DOCS / "build" / "templates"),
        trim_blocks=True,
        lstrip_blocks=lstrip_blocks,
        keep_trailing_newline=True,
    )
    environment.filters.update(wrapped=lambda text: fill(text, 120, break_on_hyphens=False, break_long_words=False))
    return environment


def write_pages(files: dict[str, str], folder: Path = DOCS, *, only: str = "") -> None:
    """Write texts by their path below ``folder``; first delete what matches the pattern ``only`` there."""
    for former in folder.glob(only) if only else ():
        former.unlink()
    for name, text in files.items():
        target = folder / name
        target.parent.mkdir(exist_ok=True)
        target.write_text(text, encoding="utf-8")
