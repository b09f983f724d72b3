"""The agents service: the OpenAI-compatible API and the sessions of outside agents."""

from frame import Page
from panels import Query, curve, per_minute, per_second, quantile, rate, share, total

PAGE = Page(
    name="agents",
    title="Agents",
    description="Requests, calls, tokens and sessions of the OpenAI-compatible API.",
    rows={
        "Requests": [
            curve(
                "Requests",
                "Per second, by class of status.",
                per_second("rollmesh_agents_requests_total", "status"),
                stacked=True,
            ),
            curve(
                "Refused tokens",
                "Requests per minute with a missing or invalid token.",
                per_minute("rollmesh_agents_refused_tokens_total"),
            ),
        ],
        "OpenAI API": [
            curve(
                "API calls",
                "Calls of the OpenAI-compatible API per second, by outcome, and those under way.",
                per_second("rollmesh_agents_calls_total", "outcome"),
                total("rollmesh_agents_running_calls", word="under way"),
            ),
            curve(
                "API tokens",
                "Tokens of contexts and answers per second; recorded ones become trajectories.",
                per_second(
                    "rollmesh_agents_context_tokens_total",
                    "recorded",
                    word="context, recorded:",
                ),
                per_second(
                    "rollmesh_agents_answer_tokens_total",
                    "recorded",
                    word="answer, recorded:",
                ),
            ),
            share(
                "Context tokens from a prefix cache",
                "Share of context tokens that the generators had computed in an earlier turn or for another call.",
                Query(
                    f"{rate('rollmesh_agents_cached_tokens_total', 'recorded')}"
                    f" / ({rate('rollmesh_agents_context_tokens_total', 'recorded')} > 0)",
                    "recorded: {{recorded}} {{run}} {{namespace}}",
                ),
            ),
            curve(
                "API latency",
                "Median time to the first text, and median and 90% of whole calls.",
                Query(quantile(0.5, "rollmesh_agents_first_text_seconds"), "first text, 50% {{run}} {{namespace}}"),
                Query(quantile(0.5, "rollmesh_agents_call_seconds"), "call, 50% {{run}} {{namespace}}"),
                Query(quantile(0.9, "rollmesh_agents_call_seconds"), "call, 90% {{run}} {{namespace}}"),
                unit="s",
            ),
            curve(
                "Sessions of agents",
                "Sessions of outside agents, by state.",
                total("rollmesh_agents_sessions", "state"),
                stacked=True,
            ),
            curve(
                "Ends of sessions",
                "Sessions that ended per minute, by how.",
                per_minute("rollmesh_agents_sessions_ended_total", "how"),
            ),
            curve(
                "Drift",
                "Contexts per minute that did not go on where the record ends, by what became of them.",
                per_minute("rollmesh_agents_drift_total", "outcome"),
            ),
        ],
    },
)
