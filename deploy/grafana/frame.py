"""Frame of every dashboard: variables, annotations, links to the others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models import dashboard as models
from panels import PROMETHEUS, RUN, Panel

_NEW_VERSION = f"run:rollmesh_policy_version:max{{{RUN}}} > (run:rollmesh_policy_version:max{{{RUN}}} offset 1m)"
_FIRING = f'ALERTS{{alertstate="firing", {RUN}}}'
TAG = "rollmesh"


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A dashboard: panels under headings."""

    name: str
    title: str
    description: str
    rows: Mapping[str, Sequence[Panel]]
    instances_of: str = ""
    """Services that the variable ``instance`` offers; without any there is no such variable."""

    def build(self) -> models.Dashboard:
        """Return the dashboard as Grafana's JSON."""
        made = _frame(self)
        if self.instances_of:
            query = f'label_values(up{{{RUN}, service=~"{self.instances_of}"}}, instance)'
            made.with_variable(_choice("instance", "Process", query))
        for heading, panels in self.rows.items():
            made.with_row(dashboard.Row(heading))
            for panel in panels:
                made.with_panel(panel)
        built = made.build()
        for number, placed in enumerate(built.panels or [], start=1):
            placed.id_val = number
        return built


def _frame(page: Page) -> dashboard.Dashboard:
    return (
        dashboard.Dashboard(f"rollmesh: {page.title}")
        .uid(f"rollmesh-{page.name}")
        .description(page.description)
        .tags([TAG])
        .refresh("15s")
        .time("now-1h", "now")
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .editable()
        .link(
            dashboard.DashboardLink("rollmesh")
            .type(models.DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .as_dropdown(True)
            .include_vars(True)
            .keep_time(True)
        )
        .with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        # Runs of one machine have no namespace.
        .with_variable(_choice("namespace", "Namespace", 'label_values(up{run!=""}, namespace)').all_value(".*"))
        .with_variable(_choice("run", "Run", 'label_values(up{run!="", namespace=~"$namespace"}, run)'))
        .annotation(_marks("Policy versions", _NEW_VERSION, "blue", shown=True))
        .annotation(_marks("Alerts", _FIRING, "red", shown=False))
    )


def _choice(name: str, label: str, query: str) -> dashboard.QueryVariable:
    """Any number of the values that a query finds; all of them by default."""
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(PROMETHEUS)
        .query(query)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .current(models.VariableOption(selected=True, text="All", value="$__all"))
    )


def _marks(name: str, expression: str, color: str, *, shown: bool) -> dashboard.AnnotationQuery:
    """Draw a line across all panels wherever the expression has a value."""
    mark = dashboard.AnnotationQuery().name(name).datasource(PROMETHEUS).expr(expression)
    return mark.icon_color(color).enable(shown)
