"""The dashboards are what their code makes, follow the house's rules, and ask for series that exist."""

import re
import subprocess
import sys
from pathlib import Path

import promql_parser
import pytest
import yaml
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from docs.build.metrics import service_metrics
from rollmesh.rollout.rollout_metrics import MeshMetrics
from rollmesh.runtime.metrics import Metrics

from ..prometheus import rule_files
from ..prometheus.rule_files import ALERTS, RECORDING, asked_values, exported_values, read_series, unknown_series
from .dashboard_files import FILES, FOLDER, PANEL_TYPES, ROOT, load, other_queries, panel_queries, panels

NAMES = {"overview", "generation", "queue", "training", "rewards", "weights", "infrastructure", "gateway", "agents"}
by_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


def test_there_is_a_dashboard_for_every_part_of_the_mesh() -> None:
    assert {file.stem for file in FILES} == NAMES
    assert len({load(file)["uid"] for file in FILES}) == len(NAMES)


def test_the_committed_dashboards_are_what_their_code_makes() -> None:
    build = ROOT / "deploy" / "grafana" / "build.py"
    done = subprocess.run([sys.executable, build, "--check"], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@by_file
def test_grafanas_own_types_read_a_dashboard_without_losing_anything(file: Path) -> None:
    register_default_plugins()
    dashboard = load(file)
    read = Dashboard.from_json(dashboard).to_json()
    assert read["uid"] == dashboard["uid"]
    for panel, again in zip(dashboard["panels"], read["panels"], strict=True):
        known = again if isinstance(again, dict) else again.to_json()
        assert set(panel) <= set(known), panel["title"]


@by_file
def test_every_panel_says_what_it_shows_and_in_which_unit(file: Path) -> None:
    dashboard = load(file)
    assert dashboard["description"].endswith(".")
    titles = [panel["title"] for panel in panels(dashboard)]
    assert len(titles) == len(set(titles))
    for panel in panels(dashboard):
        assert panel["type"] in PANEL_TYPES, panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}, panel["title"]
        assert panel["targets"], panel["title"]
        if panel["type"] in ("timeseries", "stat", "bargauge"):
            assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        for target in panel["targets"]:
            legend = target["legendFormat"]
            apart = "{{instance}}" in legend or "{{run}} {{namespace}}" in legend
            assert apart or panel["type"] in ("heatmap", "table") or target["expr"].startswith("count("), panel["title"]


@by_file
def test_panels_lie_side_by_side(file: Path) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in load(file)["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + dx, place["y"] + dy) for dx in range(place["w"]) for dy in range(place["h"])}
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


@by_file
def test_a_dashboard_has_the_variables_that_its_queries_use(file: Path) -> None:
    dashboard = load(file)
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    assert {"datasource", "namespace", "run"} <= variables
    used = set(re.findall(r"\$([a-z]+)", " ".join(t["expr"] for p in panels(dashboard) for t in p["targets"])))
    assert used | {"datasource"} == variables
    assert [mark["name"] for mark in dashboard["annotations"]["list"]] == ["Policy versions", "Alerts"]


def test_every_query_parses_is_limited_to_the_chosen_run_and_reads_exported_metrics() -> None:
    queries = [*panel_queries(), *other_queries()]
    values = exported_values() | {"service": {*service_metrics(), ".+"}}
    free = ("namespace", "run", "instance", "__name__", "alertstate")
    for query in queries:
        asked = query.asked()
        promql_parser.parse(asked)
        left = unknown_series(asked) - {"ALERTS", "scrape_duration_seconds"}
        assert not left, query
        for label, value in asked_values(asked):
            assert label in free or value in values.get(label, set()), query
        assert "$run" in query.expression or query.panel in ("variable run", "variable namespace"), query
    print(f"{len(queries)} queries parse")


def test_no_query_alert_or_rule_adds_up_runs_of_one_name_in_two_namespaces() -> None:
    """A density of one colour cannot keep runs apart, and the number of alerts is of all chosen runs."""
    whole = ("sum by (le) (increase(", "count(ALERTS{")
    queries = [query.expression for query in (*panel_queries(), *other_queries())]
    for query in queries:
        assert 'namespace=~"$namespace"' in query or query == 'up{run!=""}', query
        assert query.count('run=~"$run"') == query.count('namespace=~"$namespace", run=~"$run"'), query
    rules = [rule["expr"] for file in (RECORDING, ALERTS) for rule in rule_files.rules(file)]
    checked = 0
    for query in [*queries, *rules]:
        if query.startswith(whole):
            continue
        for labels in re.findall(r"\b(?:by|on) \(([^)]*)\)", query):
            assert {"namespace", "run"} <= set(labels.split(", ")), query
            checked += 1
        assert not re.search(r"\b(sum|min|max|avg|count|group|quantile)\s*\(", query), query
    assert checked > 250


def test_gauges_of_the_whole_mesh_are_read_from_the_leader() -> None:
    """Replicas that led before keep the values of that time."""
    metrics = Metrics("rollout")
    MeshMetrics(metrics)
    gauges = {f.name for f in metrics.registry.collect() if f.type == "gauge" and "_rollout_" in f.name}
    asking = [query for query in panel_queries() if gauges & read_series(query.asked())]
    assert len(asking) > 5
    for query in asking:
        assert "on (namespace, run, instance) rollmesh_rollout_leader == 1" in query.expression, query


def test_rates_look_back_over_what_grafana_thinks_right() -> None:
    """A fixed window is either too short for a long scrape interval or blind to what happens within it."""
    for query in panel_queries():
        fixed = set(re.findall(r"\[(\d+[smh])\]", query.expression))
        assert not fixed or query.panel == "Actions", query


def test_grafana_of_the_compose_file_finds_datasource_and_dashboards() -> None:
    provisioning = ROOT / "deploy" / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
    scrape = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())["global"]
    assert source["type"] == "prometheus"
    assert source["isDefault"]
    assert source["jsonData"]["timeInterval"] == scrape["scrape_interval"]
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "rollmesh.yaml").read_text())["providers"]
    assert provider["type"] == "file"
    deploy = ROOT / "deploy"
    compose = yaml.safe_load((deploy / "compose.yaml").read_text())
    mounted = dict(reversed(volume.split(":")[:2]) for volume in compose["services"]["grafana"]["volumes"])
    assert mounted["/etc/grafana/provisioning"] == "./grafana/provisioning"
    assert (deploy / mounted[provider["options"]["path"]]).resolve() == FOLDER.resolve()
