"""Processes, Redis, sessions and heartbeats."""

from __future__ import annotations

from frame import framed
from grafana_foundation_sdk.models import dashboard as models
from panels import ORANGE, PROCESS, RED, RUN, Part, Query, curve, led, rate, row, rows, states

NAME = "infrastructure"
_CALLS = '{{__name__=~"rollmesh_[a-z]+_store_call_seconds_{part}", {run}}}'


def build() -> models.Dashboard:
    """What an administrator looks at when the mesh itself is not the question."""
    return framed(
        NAME,
        "Infrastructure",
        "Processes and their resources, Redis as its clients see it, sessions and heartbeats.",
        [
            row("Processes"),
            *_processes(),
            row("Redis"),
            *_redis(),
        ],
        instances_of=".+",
    )


def _processes() -> list[Part]:
    return [
        states(
            "Up",
            "Whether Prometheus reaches each process.",
            Query(f"up{{{PROCESS}}}", "{{service}} {{instance}}"),
            {"0": ("down", "red"), "1": ("up", "green")},
        ),
        rows(
            "Versions",
            "Build of every process.",
            Query(f'max by (service, instance, version) ({{__name__=~"rollmesh_[a-z]+_build_info", {PROCESS}}})', ""),
        ),
        curve(
            "Processor",
            "Cores that each process uses.",
            "short",
            Query(f"rate(process_cpu_seconds_total{{{PROCESS}}}[$__rate_interval])", "{{service}} {{instance}}"),
            least=0,
        ),
        curve(
            "Memory",
            "Resident memory of each process.",
            "bytes",
            Query(f"process_resident_memory_bytes{{{PROCESS}}}", "{{service}} {{instance}}"),
            least=0,
        ),
        curve(
            "File descriptors",
            "Open, of those that may be.",
            "percentunit",
            Query(f"process_open_fds{{{PROCESS}}} / process_max_fds", "{{service}} {{instance}}"),
            least=0,
            limits=((None, "transparent"), (0.8, RED)),
        ),
        curve(
            "Age",
            "Seconds since each process started; it falls to 0 at a restart.",
            "s",
            Query(f"time() - process_start_time_seconds{{{PROCESS}}}", "{{service}} {{instance}}"),
            least=0,
        ),
        curve(
            "Scrapes",
            "Time that Prometheus needs for each process.",
            "s",
            Query(f"scrape_duration_seconds{{{PROCESS}}}", "{{service}} {{instance}}"),
            least=0,
        ),
        curve(
            "Leader",
            "Which replica leads.",
            "bool",
            Query(f"rollmesh_rollout_leader{{{RUN}}}", "{{instance}}"),
            least=0,
            most=1,
        ),
    ]


def _redis() -> list[Part]:
    buckets = _CALLS.format(part="bucket", run=RUN)
    return [
        curve(
            "Calls",
            "Calls to the store per second, by service.",
            "ops",
            Query(f"run:rollmesh_store_calls:rate5m{{{RUN}}}", "{{service}}"),
            least=0,
        ),
        curve(
            "Latency",
            "Median and 99% of the calls, as each service sees them.",
            "s",
            *(
                Query(
                    f"histogram_quantile({q}, sum by (service, le) (rate({buckets}[$__rate_interval])))",
                    f"{q:.0%} {{{{service}}}}",
                )
                for q in (0.5, 0.99)
            ),
            least=0,
            limits=((None, "transparent"), (0.25, ORANGE)),
        ),
        curve(
            "Failures",
            "Tries per second that got no answer or no room.",
            "ops",
            Query(f"run:rollmesh_store_call_failures:rate5m{{{RUN}}}", "{{service}}"),
            least=0,
        ),
        curve(
            "Memory of Redis",
            "Used by Redis, and the most it may use (0 without a limit).",
            "bytes",
            Query(led("rollmesh_rollout_store_used_memory_bytes"), "used {{run}}"),
            Query(led("rollmesh_rollout_store_max_memory_bytes"), "maxmemory {{run}}"),
            least=0,
        ),
        curve(
            "Sessions",
            "Living worker sessions, and those that expired in the last moments.",
            "none",
            Query(led("rollmesh_rollout_store_sessions"), "living {{run}}"),
            Query(
                f"sum by (run) (increase(rollmesh_rollout_sessions_lost_total{{{RUN}}}[$__rate_interval]))",
                "lost {{run}}",
            ),
            least=0,
        ),
        curve(
            "Heartbeats of generators",
            "Renewals of their registration per second, and those that the store did not take.",
            "ops",
            Query(rate("rollmesh_generator_heartbeats_total"), "sent {{run}}"),
            Query(rate("rollmesh_generator_heartbeat_failures_total"), "failed {{run}}"),
            least=0,
        ),
        curve(
            "Restarts of Redis",
            "Times that the trainer told a restored Redis what has been trained.",
            "none",
            Query(f"sum by (run) (rollmesh_trainer_reassertions_total{{{RUN}}})", "{{run}}"),
            least=0,
        ),
    ]
