"""Panels of the dashboards: a title, a description, a unit, and queries with their legends."""

from collections.abc import Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    dashboard,
    heatmap,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import heatmap as heatmap_models
from grafana_foundation_sdk.models import prometheus as prometheus_models

PROMETHEUS = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
RUN = 'namespace=~"$namespace", run=~"$run"'
"""Two namespaces may have runs of one name: every query chooses by both labels and every sum keeps both."""
PROCESS = f'{RUN}, instance=~"$instance"'
Panel = Builder[models.Panel]
GREEN, ORANGE, RED = "green", "orange", "red"
Limits = Sequence[tuple[float | None, str]]
"""Colours from a value on; the first one has no value."""
ONE_OR_MORE: Limits = ((None, RED), (1, GREEN))
_HEIGHT = 8
_REFS = "ABCDEFGHIJ"


@dataclass(frozen=True, slots=True)
class Query:
    """One expression, the legend of its series, and their unit."""

    expression: str
    legend: str
    unit: str = "none"


def rule(name: str, word: str = "", legend: str = "") -> Query:
    """Query a recording rule of the run; ``name`` follows ``run:rollmesh_``."""
    return Query(f"run:rollmesh_{name}{{{RUN}}}", legend or _legend("", word))


def gauge(metric: str, word: str = "", labels: str = RUN, legend: str = "") -> Query:
    """Query a metric as it is; of every process if ``labels`` is PROCESS."""
    legend = legend or _legend("instance" if labels == PROCESS else "", word)
    return Query(f"{metric}{{{labels}}}", legend, _unit(metric))


def total(metric: str, by: str = "", word: str = "", labels: str = RUN) -> Query:
    """Query the sum of a gauge."""
    return Query(f"sum {by_run(by)} ({metric}{{{labels}}})", _legend(by, word), _unit(metric))


def per_second(counter: str, by: str = "", word: str = "", labels: str = RUN) -> Query:
    """Query the summed increase of a counter per second."""
    unit = {"none": "ops", "bytes": "Bps"}.get(_unit(counter), _unit(counter))
    return Query(rate(counter, by, labels), _legend(by, word), unit)


def per_minute(counter: str, by: str = "", word: str = "", labels: str = RUN) -> Query:
    """Query the summed increase of a counter per minute."""
    return Query(f"60 * {rate(counter, by, labels)}", _legend(by, word))


def mean(histogram: str, by: str = "", word: str = "", labels: str = RUN) -> Query:
    """Query the mean of a histogram's observations."""
    parts = (rate(f"{histogram}_{part}", by, labels) for part in ("sum", "count"))
    return Query(" / ".join(parts), _legend(by, word), _unit(histogram))


def quantiles(histogram: str, *shares: float, by: str = "") -> list[Query]:
    """Query quantiles of a histogram, one curve each."""
    return [Query(quantile(share, histogram, by), _legend(by, f"{share:.0%}"), _unit(histogram)) for share in shares]


def led(metric: str, by: str = "") -> str:
    """Return a gauge of the whole mesh from the leader; the value of any other replica is stale."""
    leads = "and on (namespace, run, instance) rollmesh_rollout_leader == 1"
    return f"max {by_run(by)} ({metric}{{{RUN}}} {leads})"


def rate(counter: str, by: str = "", labels: str = RUN) -> str:
    """Return the summed increase of a counter per second."""
    return f"sum {by_run(by)} (rate({counter}{{{labels}}}[$__rate_interval]))"


def quantile(q: float, histogram: str, by: str = "") -> str:
    """Return a quantile of a histogram over the rate interval."""
    buckets = rate(f"{histogram}_bucket", by=f"{by}, le" if by else "le")
    return f"histogram_quantile({q:g}, {buckets})"


def by_run(labels: str = "") -> str:
    """Return the clause that keeps the run apart from all others, and these further labels."""
    return f"by (namespace, run, {labels})" if labels else "by (namespace, run)"


def _unit(metric: str) -> str:
    """Return the unit that the name of a metric says."""
    units = {"seconds": "s", "bytes": "bytes", "tokens": "short"}
    return next((unit for word, unit in units.items() if f"_{word}" in metric), "none")


def _legend(by: str, word: str) -> str:
    """Join a word, the values of the labels and the run; an instance is of one run."""
    labels = by.split(", ") if "instance" in by else [*filter(None, by.split(", ")), "run", "namespace"]
    values = " ".join(f"{{{{{label}}}}}" for label in labels)
    return f"{word} {values}".lstrip()


def above(value: float, color: str) -> Limits:
    """Draw a coloured line at a value, and nothing below it."""
    return ((None, "transparent"), (value, color))


def thresholds(steps: Limits) -> dashboard.ThresholdsConfig:
    """Convert limits to Grafana's thresholds."""
    made = [models.Threshold(value=value, color=color) for value, color in steps]
    return dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(made)


def curve(
    title: str,
    description: str,
    *queries: Query,
    unit: str = "",
    width: int = 8,
    stacked: bool = False,
    least: float | None = 0,
    most: float | None = None,
    limits: Limits = (),
    logarithmic: bool = False,
) -> timeseries.Panel:
    """Values over time, by default in the unit of the first query; ``limits`` are drawn as coloured lines."""
    panel = timeseries.Panel().title(title).description(description).datasource(PROMETHEUS)
    panel.unit(unit or queries[0].unit)
    panel.span(width).height(_HEIGHT).line_width(1).fill_opacity(60 if stacked else 8)
    panel.show_points(common_models.VisibilityMode.AUTO)
    panel.legend(
        common.VizLegendOptions()
        .display_mode(common_models.LegendDisplayMode.LIST)
        .placement(common_models.LegendPlacement.BOTTOM)
        .show_legend(True)
    )
    panel.tooltip(common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI))
    if stacked:
        panel.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL))
    if logarithmic:
        scale = common.ScaleDistributionConfig().type(common_models.ScaleDistribution.LOG).log(10)
        panel.scale_distribution(scale)
    if least is not None:
        panel.min(least)
    if most is not None:
        panel.max(most)
    if limits:
        panel.thresholds(thresholds(limits))
        panel.thresholds_style(common.GraphThresholdsStyleConfig().mode(common_models.GraphTresholdsStyleMode.DASHED))
    for ref, query in zip(_REFS, queries, strict=False):
        panel.with_target(_target(ref, query))
    return panel


def share(
    title: str, description: str, *queries: Query, stacked: bool = False, limits: Limits = ()
) -> timeseries.Panel:
    """Shares between 0 and 1 over time."""
    return curve(title, description, *queries, unit="percentunit", most=1, stacked=stacked, limits=limits)


def number(
    title: str,
    description: str,
    query: Query,
    *,
    unit: str = "none",
    limits: Limits = ((None, GREEN),),
    words: dict[str, str] | None = None,
    decimals: int | None = None,
    width: int = 4,
) -> stat.Panel:
    """One newest value in large type; ``words`` replace values."""
    panel = stat.Panel().title(title).description(description).unit(unit).datasource(PROMETHEUS)
    panel.span(width).height(4).thresholds(thresholds(limits)).graph_mode(common_models.BigValueGraphMode.AREA)
    panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
    if words:
        options = {value: models.ValueMappingResult(text=text) for value, text in words.items()}
        panel.mappings([models.ValueMap(options=options)])
        panel.graph_mode(common_models.BigValueGraphMode.NONE)
    if decimals is not None:
        panel.decimals(decimals)
    return panel.with_target(_target("A", query))


def bars(
    title: str,
    description: str,
    query: Query,
    *,
    unit: str = "none",
    width: int = 8,
    most: float | None = None,
    limits: Limits = ((None, GREEN),),
) -> bargauge.Panel:
    """Show the newest value of every series as bars side by side."""
    panel = bargauge.Panel().title(title).description(description).unit(unit).datasource(PROMETHEUS)
    panel.span(width).height(_HEIGHT).orientation(common_models.VizOrientation.HORIZONTAL).min(0)
    panel.display_mode(common_models.BarGaugeDisplayMode.BASIC).value_mode(common_models.BarGaugeValueMode.TEXT)
    panel.thresholds(thresholds(limits))
    panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
    if most is not None:
        panel.max(most)
    return panel.with_target(_target("A", query).instant())


def density(title: str, description: str, histogram: str, *, width: int = 8) -> heatmap.Panel:
    """Show the distribution of a histogram's observations over time."""
    panel = heatmap.Panel().title(title).description(description).datasource(PROMETHEUS).span(width).height(_HEIGHT)
    panel.calculate(False).cell_gap(1).y_axis(heatmap.YAxisConfig().unit(_unit(histogram)))
    panel.color(heatmap.HeatmapColorOptions().mode(heatmap_models.HeatmapColorMode.SCHEME).scheme("Viridis").steps(32))
    query = Query(f"sum by (le) (increase({histogram}_bucket{{{RUN}}}[$__rate_interval]))", "{{le}}")
    return panel.with_target(_target("A", query).format(prometheus_models.PromQueryFormat.HEATMAP))


def states(
    title: str, description: str, query: Query, words: dict[str, tuple[str, str]], *, width: int = 12
) -> statetimeline.Panel:
    """Show the state of every series over time; ``words`` are text and colour by value."""
    panel = statetimeline.Panel().title(title).description(description).datasource(PROMETHEUS)
    panel.span(width).height(_HEIGHT).row_height(0.8).merge_values(True)
    options = {value: models.ValueMappingResult(text=text, color=color) for value, (text, color) in words.items()}
    panel.mappings([models.ValueMap(options=options)])
    return panel.with_target(_target("A", query))


def rows(title: str, description: str, query: Query, *, width: int = 12) -> table.Panel:
    """Show the newest value of every series with its labels."""
    panel = table.Panel().title(title).description(description).datasource(PROMETHEUS).span(width).height(_HEIGHT)
    panel.show_header(True)
    return panel.with_target(_target("A", query).instant().format(prometheus_models.PromQueryFormat.TABLE))


def _target(ref: str, query: Query) -> prometheus.Dataquery:
    target = prometheus.Dataquery().ref_id(ref).expr(query.expression).legend_format(query.legend)
    return target.datasource(PROMETHEUS)
