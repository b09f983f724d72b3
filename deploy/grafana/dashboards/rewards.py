"""Scoring of answers: outcomes, time, load of the verifiers."""

from frame import Page
from panels import (
    GREEN,
    ORANGE,
    PROCESS,
    RED,
    RUN,
    Query,
    above,
    bars,
    by_run,
    curve,
    density,
    led,
    per_second,
    quantiles,
    rule,
    total,
)

PAGE = Page(
    name="rewards",
    title="Rewards",
    description="Outcomes by verifier and kind, the time they take, and the processes that score.",
    rows={
        "Outcomes": [
            curve(
                "Outcomes by kind",
                "Per second: scored, timed out, failed by an error of the verifier.",
                per_second("rollmesh_reward_outcomes_total", "kind", labels=PROCESS),
                stacked=True,
            ),
            curve(
                "Outcomes by verifier",
                "Per second.",
                per_second("rollmesh_reward_outcomes_total", "verifier", labels=PROCESS),
                stacked=True,
            ),
            curve(
                "Time-outs and errors",
                "Shares of the outcomes of 15 minutes; time-outs that count as wrong answers included.",
                rule("reward_timeouts:ratio_rate15m", word="time-outs"),
                rule("reward_errors:ratio_rate15m", word="errors"),
                unit="percentunit",
                limits=above(0.05, RED),
            ),
            curve(
                "Time-outs scored as wrong",
                "Per second; their verifier scores a time-out as a wrong answer.",
                per_second("rollmesh_reward_timeouts_scored_wrong_total", labels=PROCESS),
            ),
            curve(
                "Outcomes at the workers",
                "Per second as the rollout workers receive them.",
                per_second("rollmesh_rollout_reward_outcomes_total", "kind"),
            ),
        ],
        "Time": [
            curve(
                "From the last token to the outcome",
                "As the rollout workers see it, queueing included: median, 90% and 99%.",
                *quantiles("rollmesh_rollout_reward_seconds", 0.5, 0.9, 0.99),
            ),
            curve(
                "Scoring by verifier",
                "From receipt to outcome: median and 90%.",
                *quantiles("rollmesh_reward_score_seconds", 0.5, 0.9, by="verifier"),
            ),
            density(
                "Wait for a worker",
                "Time of an answer in the queue of its service.",
                "rollmesh_reward_queue_seconds",
            ),
        ],
        "Workers": [
            curve(
                "Answers in the service",
                "Received and not answered (running, the waiting ones included), waiting, and the worker processes.",
                total("rollmesh_reward_items", "state", labels=PROCESS),
                total("rollmesh_reward_workers", word="workers", labels=PROCESS),
            ),
            curve(
                "Answers that wait",
                "Finished trajectories that wait for their outcome at the workers, and those without a worker.",
                total("rollmesh_rollout_awaiting_reward_trajectories", word="held"),
                Query(led("rollmesh_rollout_unheld_scoring_trajectories"), "unheld {{run}} {{namespace}}"),
            ),
            curve(
                "Workers replaced",
                "Worker processes per second that were killed for a time-out, died, or retired.",
                per_second("rollmesh_reward_workers_replaced_total", "reason", labels=PROCESS),
            ),
            curve(
                "Answers received",
                "By each reward service, per second.",
                per_second("rollmesh_reward_answers_total", "instance", labels=PROCESS),
                stacked=True,
            ),
            bars(
                "Isolation of the workers",
                "What the kernel allows here, measured at the start; 1 where a property holds.",
                Query(
                    f"min {by_run('property')} (rollmesh_reward_isolation_enforced{{{PROCESS}}})",
                    "{{property}} {{run}} {{namespace}}",
                ),
                unit="bool",
                most=1,
                limits=((None, ORANGE), (1, GREEN)),
            ),
            curve(
                "Since the last outcome",
                "Seconds since each service last answered.",
                Query(f"time() - (rollmesh_reward_last_outcome_timestamp_seconds{{{PROCESS}}} > 0)", "{{instance}}"),
                unit="s",
            ),
        ],
        "Teachers": [
            curve(
                "From the last token to the teacher's scores",
                "As the rollout workers see it, queueing included: median, 90% and 99%.",
                *quantiles("rollmesh_rollout_teacher_seconds", 0.5, 0.9, 0.99),
            ),
            curve(
                "Trajectories that a teacher could not score",
                "Per second, as the rollout workers see it: refused, too late, or with scores that are not usable.",
                per_second("rollmesh_rollout_teacher_failures_total"),
            ),
            curve(
                "Tokens scored by teachers",
                "Response tokens per second, by teacher.",
                per_second("rollmesh_teacher_scored_tokens_total", "teacher"),
                stacked=True,
            ),
            curve(
                "Sequences in the teachers",
                "Received and not scored yet, those that wait included, by teacher.",
                total("rollmesh_teacher_running_sequences", "teacher"),
            ),
            curve(
                "Sequences without scores",
                "Per second, by teacher: log-probabilities that are not finite, or too few, or a sequence too long.",
                per_second("rollmesh_teacher_errors_total", "teacher"),
            ),
            curve(
                "Scoring by teacher",
                "From receipt of a sequence to its scores: median and 90%.",
                *quantiles("rollmesh_teacher_score_seconds", 0.5, 0.9, by="teacher"),
            ),
            curve(
                "Sequences received by teachers",
                "Per second, by teacher.",
                per_second("rollmesh_teacher_sequences_total", "teacher"),
                stacked=True,
            ),
            curve(
                "Tokens read by teachers",
                "Tokens of prompt and response of the scored sequences per second, by teacher.",
                per_second("rollmesh_teacher_context_tokens_total", "teacher"),
                stacked=True,
            ),
            curve(
                "Use of the teachers",
                "Share of the time in which a process has work, the mean over those of a teacher.",
                Query(
                    f"avg {by_run('teacher')} (rate(rollmesh_teacher_busy_seconds_total{{{RUN}}}[$__rate_interval]))",
                    "{{teacher}} {{run}} {{namespace}}",
                ),
                unit="percentunit",
                most=1,
            ),
        ],
    },
    instances_of="reward",
)
