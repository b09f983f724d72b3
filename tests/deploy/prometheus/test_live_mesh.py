"""Every query of every dashboard, and alerts, against a real Prometheus that watches a real mesh."""

import math
from collections.abc import Callable, Iterator

import pytest

from ...kit.waiting import until
from ..grafana.dashboard_files import PanelQuery, other_queries, panel_queries
from .conftest import tool
from .live import Mesh, Notifications, Prometheus, running_mesh, watching
from .rule_files import recorded

HOLD = "3s"
SETTLE_SECONDS = 400.0

pytestmark = [
    pytest.mark.long,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
]  # every deadline inside of a test passes first


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Mesh, Prometheus, Notifications]]:
    tool("prometheus")
    parent = tmp_path_factory.mktemp("watched")
    with running_mesh(parent) as mesh, watching(mesh, parent, HOLD) as (prometheus, receiver):
        yield mesh, prometheus, receiver


def has_data(prometheus: Prometheus, expression: str) -> bool:
    """Tell whether some series has a number; a quotient without data has none."""
    return any(not math.isnan(value) for _, value in prometheus.ask(expression))


def test_every_panel_shows_data(watched: tuple[Mesh, Prometheus, Notifications]) -> None:
    mesh, prometheus, _ = watched
    queries = panel_queries()
    waiting = set(queries)

    def all_answered() -> bool:
        # A latency needs calls: people and programs are part of a live mesh.
        mesh.complete()
        waiting.difference_update([query for query in waiting if has_data(prometheus, query.asked())])
        return not waiting

    def what() -> str:
        return "data for:\n" + "\n".join(f"{q.dashboard} / {q.panel}: {q.asked()}" for q in sorted(waiting, key=str))

    until(all_answered, what, SETTLE_SECONDS)
    panels = {(query.dashboard, query.panel) for query in queries}
    print(f"\n{len(queries)} of {len(queries)} queries of {len(panels)} panels return data from a live mesh")


def test_every_recording_rule_yields_a_number(watched: tuple[Mesh, Prometheus, Notifications]) -> None:
    _, prometheus, _ = watched
    waiting = set(recorded())

    def all_recorded() -> bool:
        waiting.difference_update([name for name in waiting if has_data(prometheus, name)])
        return not waiting

    until(all_recorded, lambda: f"values of {sorted(waiting)}", SETTLE_SECONDS)
    print(f"\n{len(recorded())} of {len(recorded())} recording rules yield numbers")


def test_a_new_policy_version_is_marked_and_variables_find_runs_and_processes(
    watched: tuple[Mesh, Prometheus, Notifications],
) -> None:
    _, prometheus, _ = watched
    # No alert need fire in a healthy mesh.
    waiting: set[PanelQuery] = {query for query in other_queries() if query.panel != "annotation Alerts"}
    assert waiting

    def all_answered() -> bool:
        waiting.difference_update([query for query in waiting if has_data(prometheus, query.asked())])
        return not waiting

    until(all_answered, lambda: f"data for {waiting}", SETTLE_SECONDS)


def test_a_rule_of_the_mesh_counts_what_its_processes_count(watched: tuple[Mesh, Prometheus, Notifications]) -> None:
    """A dashboard full of data may still be wrong: two figures that the processes know themselves."""
    _, prometheus, _ = watched
    shown = {
        "run:rollmesh_leaders:sum": lambda value: value == 1,
        "run:rollmesh_serving_generators:sum": lambda value: value in (1, 2),
        "run:rollmesh_max_staleness_steps:max": lambda value: value == 4,
        "run:rollmesh_staleness_headroom_steps:min": lambda value: 0 <= value <= 4,
    }
    for rule, right in shown.items():
        until_one(prometheus, rule, right)


def until_one(prometheus: Prometheus, rule: str, right: Callable[[float], bool]) -> None:
    """Wait until a rule has one value, and a right one: a scrape that came late leaves a gap, and no wrong value stays.

    What is right is right at any moment of the mesh, so that it has to show soon.
    """
    until(
        lambda: [right(value) for _, value in prometheus.ask(rule)] == [True],
        lambda: f"{rule}: {prometheus.ask(rule)}",
        60.0,
    )


def test_a_paused_mesh_is_reported_and_its_resumption_too(watched: tuple[Mesh, Prometheus, Notifications]) -> None:
    mesh, _, receiver = watched
    seen = len(receiver.notes)
    mesh.act("pause")
    until(lambda: receiver.has("MeshPaused", "firing", after=seen), lambda: f"MeshPaused: {receiver.notes}")
    mesh.act("resume")
    until(
        lambda: receiver.has("MeshPaused", "firing", "resolved", after=seen),
        lambda: f"the end of MeshPaused: {receiver.notes}",
    )


def test_a_killed_leader_is_reported_until_another_one_leads(watched: tuple[Mesh, Prometheus, Notifications]) -> None:
    mesh, prometheus, receiver = watched
    # A scrape that stalled for longer than the hold may have been reported before, and its end too.
    until(lambda: not prometheus.firing("LeaderMissing") and receiver.quiet("LeaderMissing"), lambda: "a leader")
    seen = len(receiver.notes)
    mesh.kill("rollout")
    until(lambda: receiver.has("LeaderMissing", "firing", after=seen), lambda: f"LeaderMissing: {receiver.notes}")
    until(
        lambda: receiver.has("LeaderMissing", "firing", "resolved", after=seen),
        lambda: f"the end of LeaderMissing: {receiver.notes}",
    )
    until_one(prometheus, "run:rollmesh_leaders:sum", lambda value: value == 1)
