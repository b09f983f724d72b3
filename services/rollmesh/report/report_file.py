"""``report.html``: the page of an ended run in one file, with its data inside, which opens offline.

Styles, scripts and data are inline, and nothing is fetched. The page writes text from the run as text nodes only.
"""

import base64
import html
import json
import re
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from rollmesh.config.load import run_file_text
from rollmesh.errors import CheckpointError, ConfigError
from rollmesh.file_writes import write_text
from rollmesh.gateway.archive import Archived, batch_page, readable_checkpoints, rows_of
from rollmesh.gateway.main import PAGE
from rollmesh.gateway.models.items import BatchList, PolicyList
from rollmesh.gateway.models.live import Overview, SnapshotEvent
from rollmesh.gateway.models.overview import ApiModel, ResultLine, RunSettings
from rollmesh.gateway.read_routes import run_facts
from rollmesh.gateway.trajectory_views import archived_detail, open_pieces
from rollmesh.report.console import count
from rollmesh.report.recorded_run import REPORT_FILE, RecordedRun
from rollmesh.report.view.recorded_curves import curves_beside, recorded_curves, recorded_policies
from rollmesh.report.view.recorded_overview import no_rollouts, recorded_overview

_POINTS = 300
"""Most points of a curve."""
_STEPS, _ROWS, _DETAILS, _TOKENS = 12, 50, 2, 1000
"""Batches in the file, evenly spread; rows of each, trajectories of each token by token, and tokens of these."""


def write_report(run_folder: Path) -> Path:
    """Write ``report.html`` into a complete or partial run folder; return its path.

    Raises DataError for a missing folder.
    """
    run = RecordedRun(run_folder)
    return run.replace_file(REPORT_FILE, page_in_one_file("index.html", run.name, _answers(run, ())))


def write_comparison(runs: Mapping[str, Path], target: Path) -> Path:
    """Write the page of the first run, with the curves of the others beside, by updates, by tokens and by time."""
    first, *others = (RecordedRun(path) for path in runs.values())
    write_text(target, page_in_one_file("index.html", ", ".join(runs), _answers(first, others)))
    return target


def _answers(run: RecordedRun, others: Sequence[RecordedRun]) -> dict[str, Any]:
    """Return what the read routes would answer, by their path; the page asks for nothing else."""
    curves = recorded_curves(run)
    overview, policies = recorded_overview(run, curves), recorded_policies(run)
    assert overview.result is not None
    logs = tuple(
        ResultLine(name=log.relative_to(run.path).as_posix(), value=f"{count(log.stat().st_size)} bytes")
        for log in run.logs()
    )
    overview = overview.model_copy(update={"result": overview.result.model_copy(update={"logs": logs})})
    answers: dict[str, ApiModel] = {
        "events": SnapshotEvent(overview=overview, timeline=no_rollouts(overview)),
        "series": curves_beside(curves, [recorded_curves(other) for other in others], [], _POINTS),
        "policies": PolicyList(policies=policies, total=len(policies)),
        "config": RunSettings(yaml=run_file_text(run.config) if run.config else run.config_text or ""),
        "batches": BatchList(train_steps=[]),
    }
    if run.config is not None:
        answers["about"] = run_facts(run.config, text=True)
        answers |= _trajectories(run, overview)
    # As the gateway answers: a number that is not finite, which the page could not read, is null.
    return {path: json.loads(answer.model_dump_json()) for path, answer in answers.items()}


def _trajectories(run: RecordedRun, overview: Overview) -> dict[str, ApiModel]:
    """Return some batches with some of their trajectories; none of batches that cannot be read from here."""
    assert run.config is not None
    config = run.config.model_copy(update={"folder": str(run.path), "checkpoints": run.checkpoint_section})
    pieces, found, shown = open_pieces(config), dict[str, ApiModel](), list[int]()
    try:
        store = readable_checkpoints(config)
        steps = [] if store is None else store.batch_steps()[::-1]
    except (CheckpointError, ConfigError):
        steps = []
    for step in steps[:: max(1, -(-len(steps) // _STEPS))]:
        assert store is not None
        try:
            groups = list(islice(store.groups(step), _ROWS))
        except CheckpointError as error:
            if error.outside:
                break  # another attempt would wait as long
            continue  # deleted or damaged: `rollmesh audit` says which
        rows = [row for group in groups for row in rows_of(group)][:_ROWS]
        found[f"batches/{step}"] = batch_page(step, rows, "batch", False, 0, _ROWS, pieces)
        for item, _ in rows[:_DETAILS]:
            archived = Archived(train_step=step, group=groups[0])
            detail = archived_detail(archived, item.id, overview.train_step, 0, _TOKENS, pieces)
            if detail is not None:
                found[f"trajectories/{item.id}"] = detail.model_copy(update={"next_token": None})
        shown.append(step)
    return {**found, "batches": BatchList(train_steps=shown)}


def page_in_one_file(page: str, title: str, answers: Mapping[str, Any]) -> str:
    """Return an HTML file of the page's folder with its styles, scripts and these answers of the API inside.

    Modules import each other by names of an import map.
    """
    modules = {f"page/{file.name}": _module(file) for file in sorted(PAGE.glob("*.js"))}
    # Text that begins a tag would end the element of the data.
    data = json.dumps(answers, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    text = _file(page)
    text = text.replace("<title>rollmesh</title>", f"<title>{html.escape(title)} · rollmesh</title>")
    text = re.sub(
        r'<link rel="stylesheet" href="page/(.*)">', lambda found: f"<style>\n{_file(found[1])}</style>", text
    )
    text = text.replace("page/icon.svg", _data_url("image/svg+xml", _file("icon.svg")))
    text = text.replace(
        '<script src="page/theme.js"></script>',
        f"<script>\n{_file('theme.js')}</script>\n"
        f'<script type="importmap">{json.dumps({"imports": modules})}</script>\n'
        f'<script type="application/json" id="recorded">{data}</script>',
    )
    return re.sub(r'<script type="module" src="(.*)">', r'<script type="module">import "\1";', text)


def _module(file: Path) -> str:
    text = re.sub(r'from "\./', 'from "page/', file.read_text(encoding="utf-8"))
    return _data_url("text/javascript", text)


def _data_url(kind: str, text: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(text.encode()).decode()}"


def _file(name: str) -> str:
    return (PAGE / name).read_text(encoding="utf-8")
