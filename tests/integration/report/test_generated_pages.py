"""Generated pages of docs/ are those of the code; their examples work, and pictured runs are those of the rules."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from docs.build.metrics import metrics_document, service_metrics
from docs.build.page_text import write_pages
from docs.build.pictured_run import UPDATE_TICKS, UPDATES
from docs.build.reference import FOLDER, reference_pages
from docs.build.schedules import PICTURES, figures_of, pictured, schedule_files
from docs.build.verifier_examples import VERIFIER_EXAMPLES
from rollmesh.config import RunConfig
from rollmesh.config.load import validate_run_config
from rollmesh.scheduling.presets import PRESETS
from rollmesh.tasks.sandbox.command import Sandbox
from rollmesh.tasks.verifiers.verifier_protocol import build_verifier, checked_reward

DOCS = Path(__file__).parents[3] / "docs"
DOCUMENT = DOCS / "metrics.md"


def test_the_committed_table_is_that_of_the_code() -> None:
    text = DOCUMENT.read_text()
    assert text == metrics_document(), "run: python -m docs.build.metrics"
    agents = text.partition("## agents")[2]
    assert "`rollmesh_rollout_in_flight_trajectories`" in agents
    assert "`rollmesh_rollout_leader`" not in agents


def test_names_and_labels_of_metrics_follow_the_rules() -> None:
    # What a start measures is not known before it, and no run needs a certificate.
    late = {"rollmesh_reward_isolation_enforced"}
    for service, families in service_metrics().items():
        names = {family.name for family in families}
        assert f"rollmesh_{service}_build_info" in names
        assert any(name.endswith("_timestamp_seconds") and "_certificate_" not in name for name in names)
        guarded = {f"rollmesh_{service}_certificate_{end}_timestamp_seconds" for end in ("start", "expiry")}
        for family in families:
            assert re.fullmatch(rf"rollmesh_{service}_[a-z0-9_]+", family.name)
            assert family.documentation.endswith(".")
            labels = {name for sample in family.samples for name in sample.labels}
            unbounded = {"trajectory", "group", "policy_version", "version"} & labels
            assert not unbounded or family.name.endswith("build_info")
            before_its_first_event = bool(family.samples)
            assert before_its_first_event != (family.name in late | guarded), f"{family.name}: {family.samples}"


MINIMAL = {"name": "page", "folder": "runs/page", "model": {"path": "recipe:countdown"}}


def test_the_committed_pages_are_those_of_the_code() -> None:
    pages = reference_pages()
    remedy = "run: python -m docs.build.reference"
    assert {file.name for file in (DOCS / FOLDER).iterdir()} == set(pages), remedy
    for name, text in pages.items():
        assert (DOCS / FOLDER / name).read_text() == text, f"docs/{FOLDER}/{name}: {remedy}"


def test_every_row_of_a_table_has_as_many_cells_as_its_heading() -> None:
    for file in (DOCUMENT, *(DOCS / FOLDER).iterdir()):
        for table in re.findall(r"(?:^\|.*\n)+", file.read_text(), re.MULTILINE):
            assert len({len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}) == 1, (file.name, table)


def test_a_page_of_a_former_point_is_deleted(tmp_path: Path) -> None:
    (tmp_path / "former.md").write_text("")
    write_pages({"new.md": "text", "pictures/new.svg": "<svg/>"}, tmp_path, only="*.md")
    assert {file.name for file in tmp_path.rglob("*.*")} == {"new.md", "new.svg"}


def test_every_field_of_the_run_file_has_a_row_with_a_meaning() -> None:
    text = (DOCS / FOLDER / "run-file.md").read_text()
    sections = dict(re.findall(r"^## ([\w.]+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    for path, name in fields(RunConfig):
        rows = re.findall(rf"^\| `{name}` \|.*\| ([^|\s][^|]*) \|$", sections.get(path, text), re.MULTILINE)
        assert rows, f"{path}.{name}"


@pytest.mark.parametrize("name", VERIFIER_EXAMPLES)
def test_the_example_of_a_verifier_has_the_reward_of_the_page(name: str) -> None:
    example = VERIFIER_EXAMPLES[name]
    if name == "python_code" and (reason := Sandbox.unsafe_reason()):
        pytest.skip(reason)
    verifier = build_verifier(name, example.options)
    if example.reward is not None:
        assert checked_reward(verifier.verify(example.response, example.metadata), name).value == example.reward


def test_the_verifier_of_the_examples_pays_for_a_short_right_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DOCS.parent / "examples")
    verifier = build_verifier("own_verifier:ShortAnswer", {"longest": 100})
    metadata = {"answer": 4, "prompt": "2 + 2"}
    values = [
        checked_reward(verifier.verify(text, metadata), "own").value
        for text in ("4", "5", "2 + 2 = 4", "x" * 200 + "4")
    ]
    assert values == [pytest.approx(1.099), 0.0, 1.0, 1.0]
    assert verifier.needs_prompt  # type: ignore[attr-defined]


@pytest.mark.parametrize("page", ["verifiers", "sources", "environments"])
def test_the_examples_of_a_page_are_parts_of_a_valid_run_file(page: str) -> None:
    parts = re.findall(r"^```yaml\n(.*?)^```$", (DOCS / FOLDER / f"{page}.md").read_text(), re.MULTILINE | re.DOTALL)
    assert parts
    for part in parts:
        validate_run_config({**MINIMAL, **yaml.safe_load(part)}, part)


def fields(section: type[BaseModel], path: str = "") -> Iterator[tuple[str, str]]:
    """Every field that is no section, with the dotted name of its section."""
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from fields(kind, f"{path}.{name}" if path else name)
        else:
            yield path, name


def test_the_committed_document_and_pictures_are_those_of_the_code() -> None:
    remedy = "run: python -m docs.build.schedules"
    files = schedule_files()
    for name, text in files.items():
        assert (DOCS / name).read_text() == text, f"docs/{name}: {remedy}"
    committed = {file.relative_to(DOCS).as_posix() for file in (DOCS / PICTURES).iterdir()}
    assert committed == files.keys() - {"schedules.md"}, remedy


@pytest.mark.parametrize("preset", PRESETS)
def test_a_pictured_run_trains_whole_batches_within_the_staleness_bound(preset: str) -> None:
    run = pictured(preset)
    rules = run.schedule
    assert len(run.training) == UPDATES * UPDATE_TICKS
    assert len(run.cuts) in (UPDATES, UPDATES + 1)  # a batch may be cut in the tick that trains the last one
    trained = [t for t in run.trajectories.values() if t.staleness is not None]
    assert len(trained) == len(run.cuts) * rules.groups_per_batch * rules.group_size
    assert max(t.staleness for t in trained if t.staleness is not None) <= rules.max_staleness
    running = [t.tokens | t.dropped for t in run.trajectories.values()]
    assert max(sum(tick in ticks for ticks in running) for tick in range(run.ticks)) <= rules.pool_size


def test_sync_waits_for_the_longest_of_every_batch_and_for_the_update() -> None:
    run = pictured("sync")
    # The longest of the first eight lengths is 22, of the others 15; an update takes 12 ticks.
    assert run.cuts == [22, 49, 83, 110, 144, 171]
    assert run.ticks == 3 * (22 + 12 + 15 + 12)
    figures = figures_of(run)
    assert (figures.mean_staleness, figures.off_policy, figures.dropped) == (0, 0, 0)
    assert figures.trainer_idle == pytest.approx(1 - 72 / 183)
    assert figures.mean_running == pytest.approx(3 * (66 + 58) / 183)
