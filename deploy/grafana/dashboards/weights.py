"""Path of new policies from the trainer into the engines."""

from frame import Page
from panels import (
    GREEN,
    ORANGE,
    PROCESS,
    RED,
    RUN,
    Query,
    above,
    by_run,
    curve,
    density,
    gauge,
    mean,
    number,
    per_minute,
    per_second,
    quantiles,
    rule,
)

PAGE = Page(
    name="weights",
    title="Weights sync",
    description="Versions announced and served, what a reload costs and why it fails, and the checkpoint store.",
    rows={
        "Versions": [
            curve(
                "Versions",
                "Announced by the trainer, and served by each generator.",
                rule("policy_version:max", word="announced"),
                gauge("rollmesh_generator_policy_version", labels=PROCESS),
                least=None,
            ),
            curve(
                "Skew and lag",
                "Newest minus oldest version in rotation, and announced minus oldest.",
                rule("version_skew:max", word="skew"),
                rule("version_lag:max", word="lag"),
                limits=above(2, ORANGE),
            ),
            curve(
                "Canary gap",
                "Largest difference to the trainer's log-probabilities on the canary of the loaded policy, in nats.",
                gauge("rollmesh_generator_canary_logprob_gap", labels=PROCESS),
            ),
            curve(
                "Since the last reload",
                "Age of the weights that each generator serves.",
                Query(f"time() - (rollmesh_generator_last_reload_timestamp_seconds{{{PROCESS}}} > 0)", "{{instance}}"),
                unit="s",
            ),
            curve("Policies published", "Per minute.", per_minute("rollmesh_trainer_published_policies_total")),
        ],
        "Reloads": [
            curve(
                "Duration of a reload",
                "From the announcement of a version to serving it, verified: median and 90%; and a train step.",
                *quantiles("rollmesh_generator_reload_seconds", 0.5, 0.9),
                rule("train_step_seconds:mean_rate30m", word="train step"),
            ),
            curve(
                "Phases of a reload",
                "Mean seconds: fetch from an object store; verify and stage at the same time, while the old version "
                "serves; swap and canary, while decoding is held.",
                mean("rollmesh_generator_reload_phase_seconds", "phase", labels=PROCESS),
            ),
            curve(
                "Wait for a turn",
                "Share of each generator's time in which a new version waited because others were loading "
                "(generator.reload_at_once).",
                per_second("rollmesh_generator_reload_wait_seconds_sum", "instance", labels=PROCESS),
                unit="percentunit",
            ),
            density(
                "Pause of a reload",
                "Time during which a reload holds decoding: the swap, and the canary if it is scored after the swap.",
                "rollmesh_generator_reload_pause_seconds",
            ),
            curve(
                "Time lost to reloads",
                "Share of each generator's time in which a reload holds decoding.",
                per_second("rollmesh_generator_reload_pause_seconds_sum", "instance", labels=PROCESS),
                unit="percentunit",
                limits=above(0.1, RED),
            ),
            curve(
                "Reloads and failures",
                "Attempts per minute, and those that left the old policy in place, by reason.",
                per_minute("rollmesh_generator_reloads_total", word="attempts", labels=PROCESS),
                per_minute("rollmesh_generator_reload_failures_total", "reason", word="failed:", labels=PROCESS),
            ),
            curve(
                "Bytes loaded",
                "Per second and generator.",
                per_second("rollmesh_generator_reload_bytes_total", "instance", labels=PROCESS),
            ),
            curve(
                "Interrupted calls",
                "Calls that a reload (or a drain) ended; their rollouts continue under the new weights.",
                Query(
                    f"sum {by_run('instance')}"
                    f' (rate(rollmesh_generator_calls_ended_total{{{PROCESS}, reason="interrupted"}}'
                    "[$__rate_interval]))",
                    "{{instance}}",
                ),
                unit="ops",
            ),
        ],
        "Checkpoints": [
            curve(
                "Steps trained and committed",
                "A crash replays the steps in between.",
                gauge("rollmesh_trainer_train_step", word="trained"),
                gauge("rollmesh_trainer_committed_step", word="committed"),
                least=None,
            ),
            curve(
                "Saving and publishing",
                "Mean seconds that the trainer takes to save a state, and that it waits for one publication.",
                mean("rollmesh_trainer_phase_seconds", "phase", labels=f'{RUN}, phase=~"save|publish"'),
            ),
            curve(
                "Publication",
                "Mean seconds of its phases: training waits for canary and copy of the weights (copy_out); "
                "copy_canary, write, digest and announce are in the background.",
                mean("rollmesh_trainer_publication_seconds", "phase"),
            ),
            curve(
                "Wait for publications",
                "Share of the trainer's time in which training waits for the version in flight.",
                rule("publication_wait:ratio_rate30m", word="waits"),
                unit="percentunit",
                limits=above(0.1, RED),
            ),
            curve(
                "Writes",
                "Trainer states saved per minute, and writes that failed, by reason.",
                per_minute("rollmesh_trainer_checkpoint_writes_total", word="saved"),
                per_minute("rollmesh_trainer_checkpoint_failures_total", "reason", word="failed:"),
            ),
            number(
                "Free space",
                "Of the checkpoint store's disk after the last write.",
                Query(
                    f"rollmesh_trainer_checkpoint_free_bytes{{{RUN}}}"
                    f" / (rollmesh_trainer_checkpoint_disk_bytes{{{RUN}}} > 0)",
                    "{{run}} {{namespace}}",
                ),
                unit="percentunit",
                limits=((None, RED), (0.05, ORANGE), (0.15, GREEN)),
            ),
        ],
    },
    instances_of="generator",
)
