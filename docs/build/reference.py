"""Write docs/reference from the run file's sections, registries and protocols: ``python -m docs.build.reference``."""

from docs.build.field_rows import field_tables, prose
from docs.build.method_entries import method_entries
from docs.build.page_text import DOCS, templates, write_pages
from docs.build.plug_in_points import plug_in_points, protocol_source
from docs.build.task_entries import (
    environment_entries,
    extractor_names,
    source_entries,
    verifier_entries,
)
from rollmesh.cli.configuration import POINTS, numbers
from rollmesh.config import RunConfig
from rollmesh.config.sft_config import SftConfig
from rollmesh.scheduling.presets import PRESETS
from rollmesh.tasks.environments import environment_protocol
from rollmesh.tasks.sources import source_protocol
from rollmesh.tasks.verifiers import verifier_protocol

FOLDER = "reference"


def reference_pages() -> dict[str, str]:
    """Return the texts of the pages by name."""
    environment = templates(lstrip_blocks=True)
    presets = {
        name: {"sets": ", ".join(numbers(preset)), "goes_with": prose(preset.goes_with)}
        for name, preset in PRESETS.items()
    }

    def page(template: str, **values: object) -> str:
        return environment.get_template(f"reference_{template}.md.j2").render(**values).rstrip("\n") + "\n"

    tables = list(field_tables(RunConfig.model_json_schema()))
    pages = {
        "run-file.md": page("run_file", tables=tables, presets=presets),
        "sft-file.md": page("sft_file", tables=list(field_tables(SftConfig.model_json_schema()))),
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
        entries = {point.title: method_entries(POINTS[key]) for key, point in chosen.items()}
        pages[f"{name}.md"] = page("methods", points=list(chosen.values()), methods=entries)
    return pages


if __name__ == "__main__":
    write_pages(reference_pages(), DOCS / FOLDER, only="*.md")
