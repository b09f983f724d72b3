"""How new policies get from the trainer into the engines."""

from __future__ import annotations

from frame import framed
from grafana_foundation_sdk.models import dashboard as models
from panels import ORANGE, PROCESS, RED, RUN, Part, Query, curve, density, number, quantile, rate, row

NAME = "weights"
_PHASES = f'{RUN}, phase=~"save|publish"'


def build() -> models.Dashboard:
    """Versions announced and served, reloads, and writes to the checkpoint store."""
    return framed(
        NAME,
        "Weights sync",
        "Versions announced and served, what a reload costs and why it fails, and the checkpoint store.",
        [row("Versions"), *_versions(), row("Reloads"), *_reloads(), row("Checkpoints"), *_checkpoints()],
        instances_of="generator",
    )


def _versions() -> list[Part]:
    return [
        curve(
            "Versions",
            "Announced by the trainer, and served by each generator.",
            "none",
            Query(f"run:rollmesh_policy_version:max{{{RUN}}}", "announced {{run}}"),
            Query(f"rollmesh_generator_policy_version{{{PROCESS}}}", "{{instance}}"),
        ),
        curve(
            "Skew and lag",
            "Newest minus oldest version in rotation, and announced minus oldest.",
            "none",
            Query(f"run:rollmesh_version_skew:max{{{RUN}}}", "skew {{run}}"),
            Query(f"run:rollmesh_version_lag:max{{{RUN}}}", "lag {{run}}"),
            least=0,
            limits=((None, "transparent"), (2, ORANGE)),
        ),
        curve(
            "Canary gap",
            "Largest difference to the trainer's log-probabilities on the canary of the loaded policy, in nats.",
            "none",
            Query(f"rollmesh_generator_canary_logprob_gap{{{PROCESS}}}", "{{instance}}"),
            least=0,
        ),
        curve(
            "Since the last reload",
            "Age of the weights that each generator serves.",
            "s",
            Query(f"time() - (rollmesh_generator_last_reload_timestamp_seconds{{{PROCESS}}} > 0)", "{{instance}}"),
            least=0,
        ),
        curve(
            "Policies published",
            "Per minute.",
            "none",
            Query(f"60 * {rate('rollmesh_trainer_published_policies_total')}", "{{run}}"),
            least=0,
        ),
    ]


def _reloads() -> list[Part]:
    return [
        curve(
            "Duration of a reload",
            "From learning of a version to serving it, verification included: median and 90%; and a train step.",
            "s",
            Query(quantile(0.5, "rollmesh_generator_reload_seconds"), "50% {{run}}"),
            Query(quantile(0.9, "rollmesh_generator_reload_seconds"), "90% {{run}}"),
            Query(f"run:rollmesh_train_step_seconds:mean_rate30m{{{RUN}}}", "train step {{run}}"),
            least=0,
        ),
        density(
            "Pause of a reload",
            "Time during which a reload holds decoding, canary included.",
            "s",
            "rollmesh_generator_reload_pause_seconds",
        ),
        curve(
            "Time lost to reloads",
            "Share of each generator's time in which a reload holds decoding.",
            "percentunit",
            Query(rate("rollmesh_generator_reload_pause_seconds_sum", "instance", PROCESS), "{{instance}}"),
            least=0,
            limits=((None, "transparent"), (0.1, RED)),
        ),
        curve(
            "Reloads and failures",
            "Attempts per minute, and those that left the old policy in place, by reason.",
            "none",
            Query(f"60 * {rate('rollmesh_generator_reloads_total', 'run', PROCESS)}", "attempts {{run}}"),
            Query(f"60 * {rate('rollmesh_generator_reload_failures_total', 'reason', PROCESS)}", "failed: {{reason}}"),
            least=0,
        ),
        curve(
            "Bytes loaded",
            "Per second and generator.",
            "Bps",
            Query(rate("rollmesh_generator_reload_bytes_total", "instance", PROCESS), "{{instance}}"),
            least=0,
        ),
        curve(
            "Interrupted calls",
            "Calls that a reload (or a drain) ended; their rollouts go on under the new weights.",
            "ops",
            Query(
                f'sum by (instance) (rate(rollmesh_generator_calls_ended_total{{{PROCESS}, reason="interrupted"}}'
                "[$__rate_interval]))",
                "{{instance}}",
            ),
            least=0,
        ),
    ]


def _checkpoints() -> list[Part]:
    return [
        curve(
            "Steps trained and committed",
            "A crash replays what lies between.",
            "none",
            Query(f"rollmesh_trainer_train_step{{{RUN}}}", "trained {{run}}"),
            Query(f"rollmesh_trainer_committed_step{{{RUN}}}", "committed {{run}}"),
        ),
        curve(
            "Saving and publishing",
            "Mean seconds of a state's save and of a policy's publication.",
            "s",
            Query(
                f"{rate('rollmesh_trainer_phase_seconds_sum', 'phase', _PHASES)}"
                f" / {rate('rollmesh_trainer_phase_seconds_count', 'phase', _PHASES)}",
                "{{phase}}",
            ),
            least=0,
        ),
        curve(
            "Writes",
            "Trainer states saved per minute, and writes that failed, by reason.",
            "none",
            Query(f"60 * {rate('rollmesh_trainer_checkpoint_writes_total')}", "saved {{run}}"),
            Query(f"60 * {rate('rollmesh_trainer_checkpoint_failures_total', 'reason')}", "failed: {{reason}}"),
            least=0,
        ),
        number(
            "Free space",
            "Of the checkpoint store's disk after the last write.",
            "percentunit",
            Query(
                f"rollmesh_trainer_checkpoint_free_bytes{{{RUN}}}"
                f" / (rollmesh_trainer_checkpoint_disk_bytes{{{RUN}}} > 0)",
                "{{run}}",
            ),
            limits=((None, RED), (0.05, ORANGE), (0.15, "green")),
        ),
    ]
