"""How answers are scored: outcomes, time, load of the verifiers."""

from __future__ import annotations

from frame import framed
from grafana_foundation_sdk.models import dashboard as models
from panels import GREEN, ORANGE, PROCESS, RED, RUN, Part, Query, bars, curve, density, quantile, rate, row

NAME = "rewards"


def build() -> models.Dashboard:
    """Outcomes by kind and verifier, latency and queueing, worker processes."""
    return framed(
        NAME,
        "Rewards",
        "Outcomes by verifier and kind, the time they take, and the processes that score.",
        [row("Outcomes"), *_outcomes(), row("Time"), *_time(), row("Workers"), *_workers()],
        instances_of="reward",
    )


def _outcomes() -> list[Part]:
    return [
        curve(
            "Outcomes by kind",
            "Per second: scored, timed out, failed for a fault of the verifier.",
            "ops",
            Query(rate("rollmesh_reward_outcomes_total", "kind", PROCESS), "{{kind}}"),
            stacked=True,
            least=0,
        ),
        curve(
            "Outcomes by verifier",
            "Per second.",
            "ops",
            Query(rate("rollmesh_reward_outcomes_total", "verifier", PROCESS), "{{verifier}}"),
            stacked=True,
            least=0,
        ),
        curve(
            "Time-outs and errors",
            "Shares of the outcomes of 15 minutes; time-outs that count as wrong answers included.",
            "percentunit",
            Query(f"run:rollmesh_reward_timeouts:ratio_rate15m{{{RUN}}}", "time-outs {{run}}"),
            Query(f"run:rollmesh_reward_errors:ratio_rate15m{{{RUN}}}", "errors {{run}}"),
            least=0,
            limits=((None, "transparent"), (0.05, RED)),
        ),
        curve(
            "Time-outs scored as wrong",
            "Per second; their verifier says that a time-out is a wrong answer.",
            "ops",
            Query(rate("rollmesh_reward_timeouts_scored_wrong_total", "run", PROCESS), "{{run}}"),
            least=0,
        ),
        curve(
            "Outcomes at the workers",
            "Per second as the rollout workers receive them.",
            "ops",
            Query(rate("rollmesh_rollout_reward_outcomes_total", "run, kind"), "{{kind}} {{run}}"),
            least=0,
        ),
        curve(
            "Reward of the batches",
            "Mean outcome of the trained batches.",
            "none",
            Query(f"rollmesh_trainer_outcome_mean{{{RUN}}}", "{{run}}"),
        ),
    ]


def _time() -> list[Part]:
    return [
        curve(
            "From the last token to the outcome",
            "As the rollout workers see it, queueing included: median, 90% and 99%.",
            "s",
            *(Query(quantile(q, "rollmesh_rollout_reward_seconds"), f"{q:.0%} {{{{run}}}}") for q in (0.5, 0.9, 0.99)),
            least=0,
        ),
        curve(
            "Scoring by verifier",
            "From receipt to outcome: median and 90%.",
            "s",
            *(
                Query(quantile(q, "rollmesh_reward_score_seconds", "verifier"), f"{q:.0%} {{{{verifier}}}}")
                for q in (0.5, 0.9)
            ),
            least=0,
        ),
        density(
            "Wait for a worker", "Time of an answer in the queue of its service.", "s", "rollmesh_reward_queue_seconds"
        ),
    ]


def _workers() -> list[Part]:
    return [
        curve(
            "Answers in the service",
            "Received and not answered (running, the waiting ones included), waiting, and the worker processes.",
            "none",
            Query(f"sum by (state) (rollmesh_reward_items{{{PROCESS}}})", "{{state}}"),
            Query(f"sum(rollmesh_reward_workers{{{PROCESS}}})", "workers"),
            least=0,
        ),
        curve(
            "Answers that wait",
            "Finished trajectories that wait for their outcome at the workers, and those that nobody holds.",
            "none",
            Query(f"sum by (run) (rollmesh_rollout_awaiting_reward_trajectories{{{RUN}}})", "held {{run}}"),
            Query(f"max by (run) (rollmesh_rollout_unheld_scoring_trajectories{{{RUN}}})", "unheld {{run}}"),
            least=0,
        ),
        curve(
            "Workers replaced",
            "Worker processes per second that were killed for a time-out, died, or retired.",
            "ops",
            Query(rate("rollmesh_reward_workers_replaced_total", "reason", PROCESS), "{{reason}}"),
            least=0,
        ),
        curve(
            "Answers received",
            "By each reward service, per second.",
            "ops",
            Query(rate("rollmesh_reward_answers_total", "instance", PROCESS), "{{instance}}"),
            stacked=True,
            least=0,
        ),
        bars(
            "Isolation of the workers",
            "What the kernel allows here, measured at the start; 1 where a property holds.",
            "bool",
            Query(f"min by (property) (rollmesh_reward_isolation_enforced{{{PROCESS}}})", "{{property}}"),
            most=1,
            limits=((None, ORANGE), (1, GREEN)),
        ),
        curve(
            "Since the last outcome",
            "Seconds since each service last answered.",
            "s",
            Query(f"time() - (rollmesh_reward_last_outcome_timestamp_seconds{{{PROCESS}}} > 0)", "{{instance}}"),
            least=0,
        ),
    ]
