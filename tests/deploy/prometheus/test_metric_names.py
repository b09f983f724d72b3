"""Dashboards, alerts and people's own rules read metrics by name: a renamed one must not slip by."""

from __future__ import annotations

from pathlib import Path

from rollmesh.report.metrics_document import service_metrics

LIST = Path(__file__).parent / "stable_metrics.txt"
HOW = """
If this is a new name for an old metric, keep the old one beside it for one release, with a text that begins with
"Deprecated: use NEW_NAME.", and move what reads it (rules, dashboards, runbooks) to the new one.
A metric that was deprecated in the last release may go: take its line out of tests/deploy/prometheus/stable_metrics.txt
and say so under "Removed metrics" in docs/monitoring.md.
"""


def exported() -> set[str]:
    """One line a metric: name, type, labels."""
    lines = set()
    for families in service_metrics().values():
        for family in families:
            name = f"{family.name}_total" if family.type == "counter" else family.name
            labels = sorted({label for sample in family.samples for label in sample.labels} - {"le"})
            lines.add(" ".join([name, family.type, ",".join(labels)]).strip())
    return lines


def test_no_metric_has_gone_or_changed_its_type_or_labels() -> None:
    gone = set(LIST.read_text().splitlines()) - exported()
    assert not gone, f"dashboards and alerts out there read metrics that no service exports any more: {gone}\n{HOW}"


def test_every_metric_is_on_the_list_so_that_it_stays() -> None:
    new = exported() - set(LIST.read_text().splitlines())
    assert not new, "new metrics: add these lines to tests/deploy/prometheus/stable_metrics.txt\n" + "\n".join(
        sorted(new)
    )


def test_the_list_is_sorted_and_has_each_metric_once() -> None:
    lines = LIST.read_text().splitlines()
    assert lines == sorted(set(lines))
    assert len({line.split()[0] for line in lines}) == len(lines)
