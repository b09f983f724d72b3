"""The gateway: page, REST API and operator actions."""

from frame import Page
from panels import RUN, Query, by_run, curve, mean, per_second, total

PAGE = Page(
    name="gateway",
    title="Gateway",
    description="Requests, snapshots of the mesh and operator actions.",
    rows={
        "Page and REST API": [
            curve(
                "Requests",
                "Per second, by class of status.",
                per_second("rollmesh_gateway_requests_total", "status"),
                stacked=True,
            ),
            curve(
                "Snapshots of the mesh",
                "Mean duration of a snapshot, and snapshots per second that failed.",
                mean("rollmesh_gateway_look_seconds", word="duration"),
                per_second("rollmesh_gateway_look_failures_total", word="refused"),
            ),
            curve("Live pages", "Clients that follow the live events.", total("rollmesh_gateway_event_clients")),
            curve(
                "Actions",
                "Operator actions in an hour, and requests with a missing or wrong token.",
                Query(
                    f"sum {by_run('action')} (increase(rollmesh_gateway_actions_total{{{RUN}}}[1h]))",
                    "{{action}} {{run}} {{namespace}}",
                ),
                Query(
                    f"sum {by_run()} (increase(rollmesh_gateway_refused_tokens_total{{{RUN}}}[1h]))",
                    "refused tokens {{run}} {{namespace}}",
                ),
            ),
        ],
    },
)
