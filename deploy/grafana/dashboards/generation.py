"""Use of the generators' slots, and endings of rollouts."""

from frame import Page
from panels import (
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
    gauge,
    per_second,
    quantiles,
    rate,
    rule,
    share,
    total,
)

_SERVING = f"rollmesh_generator_slots{{{PROCESS}}} * rollmesh_generator_serving{{{PROCESS}}}"
PAGE = Page(
    name="generation",
    title="Generation",
    description="Load and speed of every generator, prefill and reuse of caches, how calls and rollouts end.",
    rows={
        "Engines": [
            curve(
                "Tokens per second",
                "Tokens sampled by each generator.",
                per_second("rollmesh_generator_generated_tokens_total", "instance", labels=PROCESS),
                stacked=True,
            ),
            curve(
                "Running calls",
                "Calls in slots, beside the slots of the generators in rotation.",
                total("rollmesh_generator_running_calls", word="running", labels=PROCESS),
                total("rollmesh_generator_waiting_calls", word="waiting for a slot", labels=PROCESS),
                Query(f"sum {by_run()} ({_SERVING})", "slots {{run}} {{namespace}}"),
            ),
            share(
                "Bubble",
                "Share of each generator's slot time without a running call.",
                Query(
                    f"1 - {rate('rollmesh_generator_running_slot_seconds_total', 'instance', PROCESS)}"
                    f" / sum {by_run('instance')} ({_SERVING})",
                    "{{instance}}",
                ),
                limits=above(0.5, ORANGE),
            ),
            share(
                "Busy",
                "Share of time that each engine spends in prefill and decode.",
                per_second("rollmesh_generator_busy_seconds_total", "instance", labels=PROCESS),
            ),
            share(
                "Cache in use",
                "Tokens in the key-value cache, of those it holds.",
                Query(
                    f"rollmesh_generator_kv_tokens{{{PROCESS}}} / rollmesh_generator_kv_capacity_tokens{{{PROCESS}}}",
                    "{{instance}}",
                ),
                limits=above(0.95, RED),
            ),
            curve(
                "Preemptions",
                "Calls that lost their cache because it was full; each is prefilled again.",
                per_second("rollmesh_generator_preemptions_total", "instance", labels=PROCESS),
            ),
            curve(
                "Context tokens",
                "Computed for new prompts, computed again after an interruption, and copied from a prefix cache.",
                Query(
                    f"{rate('rollmesh_generator_prefill_tokens_total', 'run', PROCESS)}"
                    f" - {rate('rollmesh_generator_reprefill_tokens_total', 'run', PROCESS)}",
                    "first time {{run}} {{namespace}}",
                ),
                per_second("rollmesh_generator_reprefill_tokens_total", word="again", labels=PROCESS),
                per_second("rollmesh_generator_cached_tokens_total", word="from cache", labels=PROCESS),
                unit="short",
                stacked=True,
            ),
            share(
                "Re-prefill share",
                "Share of the computed context tokens that had been sampled before: what interruptions cost.",
                rule("reprefill:ratio_rate5m"),
            ),
            share(
                "Prefix cache",
                "Context tokens copied from a prefix cache, of all copied or computed since the engine started.",
                gauge("rollmesh_generator_cached_token_ratio", labels=PROCESS),
            ),
            curve(
                "Draft tokens",
                "Verified in wide decode steps: an accepted one saves its call a step, a wasted one was in vain.",
                per_second("rollmesh_generator_draft_tokens_total", "outcome", labels=PROCESS),
                stacked=True,
            ),
            curve(
                "Tokens of a call a step",
                "By running calls, in the steps of engines that draft: 1 is plain decoding.",
                Query(
                    f"{rate('rollmesh_generator_step_tokens_total', 'running', PROCESS)}"
                    f" / {rate('rollmesh_generator_call_steps_total', 'running', PROCESS)}",
                    "{{running}} running {{run}} {{namespace}}",
                ),
            ),
            curve(
                "Memory of drafts",
                "Earlier responses that the engines draft from.",
                gauge("rollmesh_generator_draft_bytes", labels=PROCESS),
            ),
            curve(
                "In rotation",
                "Whether each generator takes calls, and whether its decoding is paused.",
                gauge("rollmesh_generator_serving", word="serves", labels=PROCESS),
                gauge("rollmesh_generator_paused", word="paused", labels=PROCESS),
                unit="bool",
                most=1,
            ),
        ],
        "Calls": [
            curve(
                "Calls by end, generators",
                "Why generation calls ended, as the generators count.",
                per_second("rollmesh_generator_calls_ended_total", "reason", labels=PROCESS),
                stacked=True,
            ),
            curve(
                "Calls by end, workers",
                "Why generation calls ended, as the rollout workers count: broken and invalid answers show only here.",
                per_second("rollmesh_rollout_calls_ended_total", "reason"),
                stacked=True,
            ),
            curve(
                "Failures",
                "Share of calls that hung, broke or returned invalid data; and generators that are avoided for it.",
                rule("generation_failures:ratio_rate15m", word="failed calls"),
                unit="percentunit",
                limits=above(0.05, RED),
            ),
            curve(
                "Avoided generators",
                "Generators that workers avoid for a while after failures.",
                total("rollmesh_rollout_generators_avoided"),
            ),
            curve(
                "Held back and fruitless",
                "Calls held because their worker fell behind with saving, and calls that ended without a token.",
                per_second("rollmesh_generator_calls_held_back_total", word="held back", labels=PROCESS),
                per_second("rollmesh_rollout_calls_fruitless_total", word="fruitless"),
            ),
            curve(
                "Waiting for a generator",
                "Trajectories that found no generator with a free slot and a suitable version.",
                total("rollmesh_rollout_awaiting_generator_trajectories"),
            ),
        ],
        "Rollouts": [
            curve(
                "Finished rollouts",
                "By finish reason.",
                per_second("rollmesh_rollout_trajectories_finished_total", "reason"),
                stacked=True,
            ),
            density("Response length", "Tokens of finished responses.", "rollmesh_rollout_response_tokens"),
            curve(
                "Response length, quantiles",
                "Median, 90% and 99% of finished responses, in tokens.",
                *quantiles("rollmesh_rollout_response_tokens", 0.5, 0.9, 0.99),
            ),
            curve(
                "Leases",
                "Trajectories leased by workers, and those that continue from saved tokens.",
                per_second("rollmesh_rollout_leases_total", word="leased"),
                per_second("rollmesh_rollout_leases_resumed_total", word="resumed"),
            ),
            curve(
                "Saved as partial",
                "Rollouts saved as partial trajectories, by reason.",
                per_second("rollmesh_rollout_trajectories_parked_total", "reason"),
            ),
            curve(
                "Dropped by workers",
                "Trajectories that a worker dropped, by reason; lost ones continue on another worker.",
                per_second("rollmesh_rollout_trajectories_dropped_total", "reason"),
            ),
            curve(
                "Restarted environments",
                "Multi-turn rollouts that began again because their environment cannot be resumed.",
                per_second("rollmesh_rollout_trajectories_restarted_total"),
            ),
            curve(
                "Evaluation",
                "Tokens per second that go to evaluations rather than training.",
                per_second("rollmesh_rollout_evaluation_tokens_total"),
            ),
            bars(
                "Evaluations",
                "Claimed, finished, and dropped because no generator served their version, since the workers started.",
                Query(
                    " or ".join(
                        f"label_replace(sum {by_run()} (rollmesh_rollout_evaluations_{counter}{{{RUN}}}),"
                        f" 'what', '{word}', '', '')"
                        for counter, word in (
                            ("started_total", "claimed"),
                            ("total", "finished"),
                            ("given_up_total", "given up"),
                        )
                    ),
                    "{{what}} {{run}} {{namespace}}",
                ),
            ),
        ],
    },
    instances_of="generator",
)
