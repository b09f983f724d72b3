"""Processes, Redis, sessions and heartbeats."""

from frame import Page
from panels import (
    ORANGE,
    PROCESS,
    RED,
    RUN,
    Query,
    above,
    by_run,
    curve,
    gauge,
    led,
    per_second,
    rows,
    rule,
    states,
    total,
)

_CALLS = '{{__name__=~"rollmesh_[a-z]+_store_call_seconds_{part}", {run}}}'
buckets = _CALLS.format(part="bucket", run=RUN)
PAGE = Page(
    name="infrastructure",
    title="Infrastructure",
    description="Processes and their resources, Redis as its clients see it, sessions and heartbeats.",
    rows={
        "Processes": [
            states(
                "Up",
                "Whether Prometheus reaches each process.",
                gauge("up", legend="{{service}} {{instance}}", labels=PROCESS),
                {"0": ("down", "red"), "1": ("up", "green")},
            ),
            rows(
                "Versions",
                "Build of every process.",
                Query(
                    f"max {by_run('service, instance, version')}"
                    f' ({{__name__=~"rollmesh_[a-z]+_build_info", {PROCESS}}})',
                    "",
                ),
            ),
            curve(
                "Processor",
                "Cores that each process uses.",
                Query(f"rate(process_cpu_seconds_total{{{PROCESS}}}[$__rate_interval])", "{{service}} {{instance}}"),
                unit="short",
            ),
            curve(
                "Memory",
                "Resident memory of each process.",
                gauge("process_resident_memory_bytes", legend="{{service}} {{instance}}", labels=PROCESS),
            ),
            curve(
                "File descriptors",
                "Open, of those that may be.",
                Query(f"process_open_fds{{{PROCESS}}} / process_max_fds", "{{service}} {{instance}}"),
                unit="percentunit",
                limits=above(0.8, RED),
            ),
            curve(
                "Age",
                "Seconds since each process started; it falls to 0 at a restart.",
                Query(f"time() - process_start_time_seconds{{{PROCESS}}}", "{{service}} {{instance}}"),
                unit="s",
            ),
            curve(
                "Scrapes",
                "Duration of a scrape of each process.",
                gauge("scrape_duration_seconds", legend="{{service}} {{instance}}", labels=PROCESS),
            ),
            curve(
                "Leader",
                "Which replica leads.",
                gauge("rollmesh_rollout_leader", legend="{{instance}}"),
                unit="bool",
                most=1,
            ),
        ],
        "Redis": [
            curve(
                "Calls",
                "Calls to the store per second, by service.",
                rule("store_calls:rate5m", legend="{{service}} {{run}} {{namespace}}"),
                unit="ops",
            ),
            curve(
                "Latency",
                "Median and 99% of the calls, as each service sees them.",
                *(
                    Query(
                        f"histogram_quantile({q}, sum {by_run('service, le')} (rate({buckets}[$__rate_interval])))",
                        f"{q:.0%} {{{{service}}}} {{{{run}}}} {{{{namespace}}}}",
                    )
                    for q in (0.5, 0.99)
                ),
                unit="s",
                limits=above(0.25, ORANGE),
            ),
            curve(
                "Failures",
                "Attempts per second without an answer or without memory.",
                rule("store_call_failures:rate5m", legend="{{service}} {{run}} {{namespace}}"),
                unit="ops",
            ),
            curve(
                "Memory of Redis",
                "Used by Redis, and the most it may use (0 without a limit).",
                Query(led("rollmesh_rollout_store_used_memory_bytes"), "used {{run}} {{namespace}}"),
                Query(led("rollmesh_rollout_store_max_memory_bytes"), "maxmemory {{run}} {{namespace}}"),
                unit="bytes",
            ),
            curve(
                "Sessions",
                "Living worker sessions, and those that expired in the last moments.",
                Query(led("rollmesh_rollout_store_sessions"), "living {{run}} {{namespace}}"),
                Query(
                    f"sum {by_run()} (increase(rollmesh_rollout_sessions_lost_total{{{RUN}}}[$__rate_interval]))",
                    "lost {{run}} {{namespace}}",
                ),
            ),
            curve(
                "Heartbeats of generators",
                "Renewals of their registration per second, and those that the store rejected.",
                per_second("rollmesh_generator_heartbeats_total", word="sent"),
                per_second("rollmesh_generator_heartbeat_failures_total", word="failed"),
            ),
            curve(
                "Restarts of Redis",
                "Times that the trainer reported its steps to a restored Redis.",
                total("rollmesh_trainer_reassertions_total"),
            ),
        ],
    },
    instances_of=".+",
)
