"""The gateway: page, REST API, operator actions, and the OpenAI-compatible API."""

from __future__ import annotations

from frame import Page
from panels import RUN, Query, curve, per_minute, per_second, quantile, rate, total

PAGE = Page(
    name="gateway",
    title="Gateway",
    description=(
        "Requests, snapshots of the mesh and operator actions; calls, tokens and sessions of the OpenAI-compatible API."
    ),
    rows={
        "Page and REST API": [
            curve(
                "Requests",
                "Per second, by class of status.",
                per_second("rollmesh_gateway_requests_total", "run, status"),
                unit="ops",
                stacked=True,
            ),
            curve(
                "Snapshots of the mesh",
                "Mean duration of a snapshot, and snapshots per second that failed.",
                Query(
                    f"{rate('rollmesh_gateway_look_seconds_sum')} / {rate('rollmesh_gateway_look_seconds_count')}",
                    "duration {{run}}",
                ),
                per_second("rollmesh_gateway_look_failures_total", word="refused"),
                unit="s",
            ),
            curve("Live pages", "Clients that follow the live events.", total("rollmesh_gateway_event_clients")),
            curve(
                "Actions",
                "Operator actions in an hour, and requests with a missing or wrong token.",
                Query(f"sum by (action) (increase(rollmesh_gateway_actions_total{{{RUN}}}[1h]))", "{{action}}"),
                Query(f"sum(increase(rollmesh_gateway_refused_tokens_total{{{RUN}}}[1h]))", "refused tokens"),
            ),
        ],
        "OpenAI API": [
            curve(
                "API calls",
                "Calls of the OpenAI-compatible API per second, by outcome, and those in progress.",
                per_second("rollmesh_gateway_openai_calls_total", "run, outcome"),
                total("rollmesh_gateway_openai_running_calls", word="in progress"),
                unit="ops",
            ),
            curve(
                "API tokens",
                "Tokens of contexts and answers per second; recorded ones become trajectories.",
                per_second(
                    "rollmesh_gateway_openai_context_tokens_total",
                    "run, recorded",
                    legend="context, recorded: {{recorded}}",
                ),
                per_second(
                    "rollmesh_gateway_openai_answer_tokens_total",
                    "run, recorded",
                    legend="answer, recorded: {{recorded}}",
                ),
                unit="short",
            ),
            curve(
                "API latency",
                "Median time to the first text, and median and 90% of whole calls.",
                Query(quantile(0.5, "rollmesh_gateway_openai_first_text_seconds"), "first text, 50% {{run}}"),
                Query(quantile(0.5, "rollmesh_gateway_openai_call_seconds"), "call, 50% {{run}}"),
                Query(quantile(0.9, "rollmesh_gateway_openai_call_seconds"), "call, 90% {{run}}"),
                unit="s",
            ),
            curve(
                "Sessions of agents",
                "Sessions of outside agents, by state.",
                total("rollmesh_gateway_openai_sessions", "run, state"),
                stacked=True,
            ),
            curve(
                "Ends of sessions",
                "Sessions that ended per minute, by reason.",
                per_minute("rollmesh_gateway_openai_sessions_ended_total", "run, how"),
            ),
            curve(
                "Drift",
                "Contexts per minute that do not continue the record, by outcome.",
                per_minute("rollmesh_gateway_openai_drift_total", "run, outcome"),
            ),
        ],
    },
)
