"""The gateway: page, REST API, actions of people, and the OpenAI-compatible API."""

from __future__ import annotations

from frame import framed
from grafana_foundation_sdk.models import dashboard as models
from panels import RUN, Part, Query, curve, quantile, rate, row

NAME = "gateway"


def build() -> models.Dashboard:
    """Requests and looks of the gateway, then calls and sessions of its OpenAI-compatible API."""
    return framed(
        NAME,
        "Gateway",
        "Requests, looks at the mesh and actions of people; calls, tokens and sessions of the OpenAI-compatible API.",
        [row("Page and REST API"), *_gateway(), row("OpenAI API"), *_openai()],
    )


def _gateway() -> list[Part]:
    return [
        curve(
            "Requests",
            "Per second, by class of status.",
            "ops",
            Query(rate("rollmesh_gateway_requests_total", "run, status"), "{{status}} {{run}}"),
            stacked=True,
            least=0,
        ),
        curve(
            "Looks at the mesh",
            "Mean duration of a look, and looks per second that the store refused.",
            "s",
            Query(
                f"{rate('rollmesh_gateway_look_seconds_sum')} / {rate('rollmesh_gateway_look_seconds_count')}",
                "duration {{run}}",
            ),
            Query(rate("rollmesh_gateway_look_failures_total"), "refused {{run}}"),
            least=0,
        ),
        curve(
            "Live pages",
            "Clients that follow the live events.",
            "none",
            Query(f"sum by (run) (rollmesh_gateway_event_clients{{{RUN}}})", "{{run}}"),
            least=0,
        ),
        curve(
            "Actions",
            "Actions taken by people in an hour, and requests with a missing or wrong token.",
            "none",
            Query(f"sum by (action) (increase(rollmesh_gateway_actions_total{{{RUN}}}[1h]))", "{{action}}"),
            Query(f"sum(increase(rollmesh_gateway_refused_tokens_total{{{RUN}}}[1h]))", "refused tokens"),
            least=0,
        ),
    ]


def _openai() -> list[Part]:
    return [
        curve(
            "API calls",
            "Calls of the OpenAI-compatible API per second, by outcome, and those under way.",
            "ops",
            Query(rate("rollmesh_gateway_openai_calls_total", "run, outcome"), "{{outcome}} {{run}}"),
            Query(f"sum by (run) (rollmesh_gateway_openai_running_calls{{{RUN}}})", "under way {{run}}"),
            least=0,
        ),
        curve(
            "API tokens",
            "Tokens of contexts and answers per second; recorded ones become trajectories.",
            "short",
            Query(
                rate("rollmesh_gateway_openai_context_tokens_total", "run, recorded"), "context, recorded: {{recorded}}"
            ),
            Query(
                rate("rollmesh_gateway_openai_answer_tokens_total", "run, recorded"), "answer, recorded: {{recorded}}"
            ),
            least=0,
        ),
        curve(
            "API latency",
            "Median time to the first text, and median and 90% of whole calls.",
            "s",
            Query(quantile(0.5, "rollmesh_gateway_openai_first_text_seconds"), "first text, 50% {{run}}"),
            Query(quantile(0.5, "rollmesh_gateway_openai_call_seconds"), "call, 50% {{run}}"),
            Query(quantile(0.9, "rollmesh_gateway_openai_call_seconds"), "call, 90% {{run}}"),
            least=0,
        ),
        curve(
            "Sessions of agents",
            "Sessions of outside agents, by state.",
            "none",
            Query(f"sum by (run, state) (rollmesh_gateway_openai_sessions{{{RUN}}})", "{{state}} {{run}}"),
            stacked=True,
            least=0,
        ),
        curve(
            "Ends of sessions",
            "Sessions that ended per minute, by how.",
            "none",
            Query(f"60 * {rate('rollmesh_gateway_openai_sessions_ended_total', 'run, how')}", "{{how}} {{run}}"),
            least=0,
        ),
        curve(
            "Drift",
            "Contexts per minute that did not go on where the record ends, by what became of them.",
            "none",
            Query(f"60 * {rate('rollmesh_gateway_openai_drift_total', 'run, outcome')}", "{{outcome}} {{run}}"),
            least=0,
        ),
    ]
