"""Generator of the pages in ``docs/reference``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import fill

from jinja2 import Environment, PackageLoader

from rollmesh.config import RunConfig
from rollmesh.config.methods import Method
from rollmesh.file_writes import write_text
from rollmesh.report.reference.field_rows import field_tables, prose
from rollmesh.report.reference.method_entries import method_entries
from rollmesh.report.reference.plug_in_points import plug_in_points
from rollmesh.report.reference.protocol_source import protocol_source
from rollmesh.report.reference.task_entries import (
    environment_entries,
    extractor_names,
    source_entries,
    verifier_entries,
)
from rollmesh.scheduling.presets import PRESETS, Preset
from rollmesh.tasks.environments import environment_protocol
from rollmesh.tasks.sources import source_protocol
from rollmesh.tasks.verifiers import verifier_protocol

FOLDER = "reference"


def reference_pages(
    methods: Mapping[str, Mapping[str, Method]],
    settings: Mapping[str, Sequence[str]],
    numbers: Callable[[Preset], Sequence[str]],
) -> dict[str, str]:
    """Return the texts of the pages by name.

    ``methods`` has the methods by point, ``settings`` the ``a.b=c`` overrides with which the demo runs each, by
    ``point/method``, and ``numbers`` describes a preset.
    """
    environment = Environment(
        loader=PackageLoader("rollmesh.report"), trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters.update(wrapped=lambda text: fill(text, 120, break_on_hyphens=False, break_long_words=False))
    presets = {
        name: {"sets": ", ".join(numbers(preset)), "goes_with": prose(preset.goes_with)}
        for name, preset in PRESETS.items()
    }

    def page(template: str, **values: object) -> str:
        return environment.get_template(f"reference_{template}.md.j2").render(**values).rstrip("\n") + "\n"

    tables = list(field_tables(RunConfig.model_json_schema()))
    pages = {
        "run-file.md": page("run_file", tables=tables, presets=presets),
        "verifiers.md": page(
            "verifiers",
            verifiers=verifier_entries(),
            extract=extractor_names(),
            contract=protocol_source(verifier_protocol, "RewardParts", "Verifier", "AsyncVerifier"),
        ),
        "sources.md": page(
            "sources",
            sources=source_entries(),
            contract=protocol_source(source_protocol, "SourceRows", "PromptSource", "RowSource"),
        ),
        "environments.md": page(
            "environments",
            environments=environment_entries(),
            contract=protocol_source(environment_protocol, "EnvironmentReply", "Environment", "SnapshotEnvironment"),
        ),
    }
    points = plug_in_points()
    for name in dict.fromkeys(point.page for point in points.values()):
        chosen = {key: point for key, point in points.items() if point.page == name}
        entries = {point.title: method_entries(key, methods[key], settings) for key, point in chosen.items()}
        pages[f"{name}.md"] = page("methods", points=list(chosen.values()), methods=entries)
    return pages


def write_reference_pages(
    folder: Path,
    methods: Mapping[str, Mapping[str, Method]],
    settings: Mapping[str, Sequence[str]],
    numbers: Callable[[Preset], Sequence[str]],
) -> None:
    """Write the pages below ``folder``, and delete pages of former points."""
    target = folder / FOLDER
    target.mkdir(exist_ok=True)
    for former in target.glob("*.md"):
        former.unlink()
    for name, text in reference_pages(methods, settings, numbers).items():
        write_text(target / name, text)
