"""The shipped dashboards as data."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "helm" / "rollmesh" / "files" / "dashboards"
FILES = sorted(FOLDER.glob("*.json"))
PANEL_TYPES = {"timeseries", "stat", "bargauge", "heatmap", "state-timeline", "table"}
"""Panel types of the dashboards; none is deprecated."""


@dataclass(frozen=True)
class PanelQuery:
    """One query of one panel."""

    dashboard: str
    panel: str
    expression: str

    def asked(self, window: str = "30s") -> str:
        """The expression with Grafana's variables replaced."""
        text = self.expression
        for name, value in (("$__rate_interval", window), ("$instance", ".*"), ("$run", ".*"), ("$namespace", ".*")):
            text = text.replace(name, value)
        return text


def load(file: Path) -> dict[str, Any]:
    """One dashboard."""
    data: dict[str, Any] = json.loads(file.read_text())
    return data


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """Panels without the headings between them."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def panel_queries() -> list[PanelQuery]:
    """Every query of every panel."""
    return [
        PanelQuery(file.stem, panel["title"], target["expr"])
        for file in FILES
        for panel in panels(load(file))
        for target in panel["targets"]
    ]


def other_queries() -> Iterator[PanelQuery]:
    """Queries of annotations, and the series that variables choose from."""
    for file in FILES:
        dashboard = load(file)
        for mark in dashboard["annotations"]["list"]:
            yield PanelQuery(file.stem, f"annotation {mark['name']}", mark["expr"])
        for variable in dashboard["templating"]["list"]:
            if variable["type"] == "query":
                series = variable["query"].removeprefix("label_values(").rpartition(",")[0]
                yield PanelQuery(file.stem, f"variable {variable['name']}", series)
