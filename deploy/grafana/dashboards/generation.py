"""What the generators do with their slots, and how rollouts end."""

from __future__ import annotations

from frame import framed
from grafana_foundation_sdk.models import dashboard as models
from panels import ORANGE, PROCESS, RED, RUN, Part, Query, bars, curve, density, quantile, rate, row

NAME = "generation"
_SERVING = f"rollmesh_generator_slots{{{PROCESS}}} * rollmesh_generator_serving{{{PROCESS}}}"


def build() -> models.Dashboard:
    """Generators one by one, then rollouts as their workers see them."""
    return framed(
        NAME,
        "Generation",
        "Load and speed of every generator, prefill and reuse of caches, how calls and rollouts end.",
        [row("Engines"), *_engines(), row("Calls"), *_calls(), row("Rollouts"), *_rollouts()],
        instances_of="generator",
    )


def _engines() -> list[Part]:
    return [
        curve(
            "Tokens per second",
            "Tokens sampled by each generator.",
            "short",
            Query(rate("rollmesh_generator_generated_tokens_total", "instance", PROCESS), "{{instance}}"),
            stacked=True,
            least=0,
        ),
        curve(
            "Running calls",
            "Calls in slots, beside the slots of the generators in rotation.",
            "none",
            Query(f"sum(rollmesh_generator_running_calls{{{PROCESS}}})", "running"),
            Query(f"sum(rollmesh_generator_waiting_calls{{{PROCESS}}})", "waiting for a slot"),
            Query(f"sum({_SERVING})", "slots"),
            least=0,
        ),
        curve(
            "Bubble",
            "Share of each generator's slot time without a running call.",
            "percentunit",
            Query(
                f"1 - {rate('rollmesh_generator_running_slot_seconds_total', 'instance', PROCESS)}"
                f" / sum by (instance) ({_SERVING})",
                "{{instance}}",
            ),
            least=0,
            most=1,
            limits=((None, "transparent"), (0.5, ORANGE)),
        ),
        curve(
            "Busy",
            "Share of time that each engine spends in prefill and decode.",
            "percentunit",
            Query(rate("rollmesh_generator_busy_seconds_total", "instance", PROCESS), "{{instance}}"),
            least=0,
            most=1,
        ),
        curve(
            "Cache in use",
            "Tokens in the key-value cache, of those it holds.",
            "percentunit",
            Query(
                f"rollmesh_generator_kv_tokens{{{PROCESS}}} / rollmesh_generator_kv_capacity_tokens{{{PROCESS}}}",
                "{{instance}}",
            ),
            least=0,
            most=1,
            limits=((None, "transparent"), (0.95, RED)),
        ),
        curve(
            "Context tokens",
            "Computed for new prompts, computed again after an interruption, and copied from a prefix cache.",
            "short",
            Query(
                f"{rate('rollmesh_generator_prefill_tokens_total', 'run', PROCESS)}"
                f" - {rate('rollmesh_generator_reprefill_tokens_total', 'run', PROCESS)}",
                "first time {{run}}",
            ),
            Query(rate("rollmesh_generator_reprefill_tokens_total", "run", PROCESS), "again {{run}}"),
            Query(rate("rollmesh_generator_cached_tokens_total", "run", PROCESS), "from cache {{run}}"),
            stacked=True,
            least=0,
        ),
        curve(
            "Re-prefill share",
            "Share of the computed context tokens that had been sampled before: what interruptions cost.",
            "percentunit",
            Query(f"run:rollmesh_reprefill:ratio_rate5m{{{RUN}}}", "{{run}}"),
            least=0,
            most=1,
        ),
        curve(
            "Prefix cache",
            "Context tokens copied from a prefix cache, of all copied or computed since the engine started.",
            "percentunit",
            Query(f"rollmesh_generator_cached_token_ratio{{{PROCESS}}}", "{{instance}}"),
            least=0,
            most=1,
        ),
        curve(
            "In rotation",
            "Whether each generator takes calls, and whether its decoding is paused.",
            "bool",
            Query(f"rollmesh_generator_serving{{{PROCESS}}}", "serves {{instance}}"),
            Query(f"rollmesh_generator_paused{{{PROCESS}}}", "paused {{instance}}"),
            least=0,
            most=1,
        ),
    ]


def _calls() -> list[Part]:
    return [
        curve(
            "Calls by end, generators",
            "Why generation calls ended, as the generators count.",
            "ops",
            Query(rate("rollmesh_generator_calls_ended_total", "reason", PROCESS), "{{reason}}"),
            stacked=True,
            least=0,
        ),
        curve(
            "Calls by end, workers",
            "Why generation calls ended, as the rollout workers count: broken and senseless answers show only here.",
            "ops",
            Query(rate("rollmesh_rollout_calls_ended_total", "reason"), "{{reason}}"),
            stacked=True,
            least=0,
        ),
        curve(
            "Failures",
            "Share of calls that hung, broke or answered what cannot be right; and generators that are avoided for it.",
            "percentunit",
            Query(f"run:rollmesh_generation_failures:ratio_rate15m{{{RUN}}}", "failed calls {{run}}"),
            least=0,
            limits=((None, "transparent"), (0.05, RED)),
        ),
        curve(
            "Avoided generators",
            "Generators that workers leave alone for a while after misbehaviour.",
            "none",
            Query(f"sum by (run) (rollmesh_rollout_generators_avoided{{{RUN}}})", "{{run}}"),
            least=0,
        ),
        curve(
            "Held back and fruitless",
            "Calls ended because their worker fell behind with saving, and calls given up without a token.",
            "ops",
            Query(rate("rollmesh_generator_calls_held_back_total", "run", PROCESS), "held back {{run}}"),
            Query(rate("rollmesh_rollout_calls_fruitless_total"), "fruitless {{run}}"),
            least=0,
        ),
        curve(
            "Waiting for a generator",
            "Trajectories that found no generator with a free seat and a version that suits them.",
            "none",
            Query(f"sum by (run) (rollmesh_rollout_awaiting_generator_trajectories{{{RUN}}})", "{{run}}"),
            least=0,
        ),
    ]


def _rollouts() -> list[Part]:
    return [
        curve(
            "Finished rollouts",
            "By finish reason.",
            "ops",
            Query(rate("rollmesh_rollout_trajectories_finished_total", "run, reason"), "{{reason}} {{run}}"),
            stacked=True,
            least=0,
        ),
        density("Response length", "Tokens of finished responses.", "none", "rollmesh_rollout_response_tokens"),
        curve(
            "Response length, quantiles",
            "Median, 90% and 99% of finished responses, in tokens.",
            "none",
            *(Query(quantile(q, "rollmesh_rollout_response_tokens"), f"{q:.0%} {{{{run}}}}") for q in (0.5, 0.9, 0.99)),
            least=0,
        ),
        curve(
            "Leases",
            "Trajectories taken up by workers, and how many of them go on from saved tokens.",
            "ops",
            Query(rate("rollmesh_rollout_leases_total"), "leased {{run}}"),
            Query(rate("rollmesh_rollout_leases_resumed_total"), "resumed {{run}}"),
            least=0,
        ),
        curve(
            "Put to rest",
            "Rollouts parked as partial trajectories, by reason.",
            "ops",
            Query(rate("rollmesh_rollout_trajectories_parked_total", "run, reason"), "{{reason}} {{run}}"),
            least=0,
        ),
        curve(
            "Given up",
            "Trajectories that a worker dropped, by reason; lost ones go on elsewhere.",
            "ops",
            Query(rate("rollmesh_rollout_trajectories_dropped_total", "run, reason"), "{{reason}} {{run}}"),
            least=0,
        ),
        curve(
            "Restarted environments",
            "Multi-turn rollouts that began again because their environment cannot be resumed.",
            "ops",
            Query(rate("rollmesh_rollout_trajectories_restarted_total"), "{{run}}"),
            least=0,
        ),
        curve(
            "Evaluation",
            "Tokens per second that go to evaluations rather than training.",
            "short",
            Query(rate("rollmesh_rollout_evaluation_tokens_total"), "{{run}}"),
            least=0,
        ),
        bars(
            "Evaluations",
            "Claimed and finished since the workers started.",
            "none",
            Query(
                f"label_replace(sum(rollmesh_rollout_evaluations_started_total{{{RUN}}}), 'what', 'claimed', '', '')"
                f" or label_replace(sum(rollmesh_rollout_evaluations_total{{{RUN}}}), 'what', 'finished', '', '')",
                "{{what}}",
            ),
        ),
    ]
