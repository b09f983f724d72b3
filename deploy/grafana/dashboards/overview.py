"""Is the run all right, how far is it, and what holds it back."""

from __future__ import annotations

from frame import framed
from grafana_foundation_sdk.models import dashboard as models
from panels import GREEN, ORANGE, RED, RUN, Part, Query, curve, number, rate, row

NAME = "overview"


def build() -> models.Dashboard:
    """The first page that a person on call opens."""
    return framed(
        NAME,
        "Overview",
        "One run at a glance: state, progress, learning, throughput and what it waits for.",
        [row("State"), *_state(), row("Learning"), *_learning(), row("Flow"), *_flow()],
    )


def _state() -> list[Part]:
    return [
        number(
            "Leader",
            "Replicas that lead the mesh; without one nothing is admitted or cut.",
            "none",
            Query(f"run:rollmesh_leaders:sum{{{RUN}}}", "{{run}}"),
            limits=((None, RED), (1, GREEN)),
            words={"0": "none", "1": "leads"},
        ),
        number(
            "Train step",
            "Batches the policy has been trained on.",
            "none",
            Query(f'run:rollmesh_train_step:max{{{RUN}, kind="trained"}}', "{{run}}"),
        ),
        number(
            "Done",
            "Share of the run's train steps.",
            "percentunit",
            Query(
                f'run:rollmesh_train_step:max{{{RUN}, kind="trained"}}'
                f' / ignoring (kind) run:rollmesh_train_step:max{{{RUN}, kind="last"}}',
                "{{run}}",
            ),
        ),
        number(
            "Policy version",
            "Newest announced policy version.",
            "none",
            Query(f"run:rollmesh_policy_version:max{{{RUN}}}", "{{run}}"),
        ),
        number(
            "Generators",
            "Generators in rotation.",
            "none",
            Query(f"run:rollmesh_serving_generators:sum{{{RUN}}}", "{{run}}"),
            limits=((None, RED), (1, GREEN)),
        ),
        number(
            "Firing alerts",
            "Alerts of the run that fire now, by any severity.",
            "none",
            Query(f'count(ALERTS{{alertstate="firing", {RUN}}}) or vector(0)', "alerts"),
            limits=((None, GREEN), (1, ORANGE), (3, RED)),
        ),
        number(
            "Resting",
            "Whether the run is paused by a person, recovering, failed or complete, so that nothing should happen.",
            "none",
            Query(f"run:rollmesh_resting:max{{{RUN}}}", "{{run}}"),
            limits=((None, GREEN), (1, ORANGE)),
            words={"0": "works", "1": "rests"},
        ),
        number(
            "Processes up",
            "Share of the run's scrape targets that answer.",
            "percentunit",
            Query(f"avg by (run) (up{{{RUN}}})", "{{run}}"),
            limits=((None, RED), (0.8, ORANGE), (1, GREEN)),
        ),
        number(
            "Generated per second",
            "Tokens sampled by all generators.",
            "short",
            Query(f"run:rollmesh_generated_tokens:rate5m{{{RUN}}}", "{{run}}"),
            decimals=0,
        ),
        number(
            "Goodput",
            "Share of the sampled tokens that reached a batch, over half an hour.",
            "percentunit",
            Query(f"run:rollmesh_goodput:ratio_rate30m{{{RUN}}}", "{{run}}"),
            limits=((None, RED), (0.5, ORANGE), (0.8, GREEN)),
        ),
        number(
            "Queue memory",
            "What Redis holds and running rollouts may still write, of its maxmemory; admission stops at 80%.",
            "percentunit",
            Query(f"run:rollmesh_store_memory_ratio:max{{{RUN}}}", "{{run}}"),
            limits=((None, GREEN), (0.6, ORANGE), (0.8, RED)),
        ),
        number(
            "Dead letters",
            "Trajectories that gave up and are kept for inspection.",
            "none",
            Query(f"run:rollmesh_dead_letters:max{{{RUN}}}", "{{run}}"),
            limits=((None, GREEN), (1, ORANGE)),
        ),
    ]


def _learning() -> list[Part]:
    return [
        curve(
            "Reward",
            "Mean outcome of each batch before shaping, and the shaped reward that was trained on.",
            "none",
            Query(f"rollmesh_trainer_outcome_mean{{{RUN}}}", "outcome {{run}}"),
            Query(f"rollmesh_trainer_reward_mean{{{RUN}}}", "reward {{run}}"),
        ),
        curve(
            "Response length",
            "Mean response length of each batch, in tokens.",
            "none",
            Query(f"rollmesh_trainer_response_length_mean_tokens{{{RUN}}}", "{{run}}"),
            least=0,
        ),
        curve(
            "Health of the updates",
            "Effective sample size per trajectory, and the shares of tokens that were off-policy or cut by a clip.",
            "percentunit",
            Query(f"rollmesh_trainer_effective_sample_ratio{{{RUN}}}", "effective samples {{run}}"),
            Query(f"rollmesh_trainer_off_policy_token_ratio{{{RUN}}}", "off-policy tokens {{run}}"),
            Query(f"rollmesh_trainer_ratio_clipped_ratio{{{RUN}}}", "clipped tokens {{run}}"),
            least=0,
            most=1,
        ),
    ]


def _flow() -> list[Part]:
    return [
        curve(
            "Tokens per second",
            "Sampled by the engines, kept by the rollout workers, trained on.",
            "short",
            Query(rate("rollmesh_generator_generated_tokens_total"), "sampled {{run}}"),
            Query(rate("rollmesh_rollout_sampled_tokens_total"), "kept {{run}}"),
            Query(rate("rollmesh_trainer_trained_tokens_total"), "trained {{run}}"),
            least=0,
        ),
        curve(
            "Who waits",
            "Empty slots of the generators (bubble) and the trainer's time without a batch: the higher one has slack.",
            "percentunit",
            Query(f"run:rollmesh_bubble:ratio_rate5m{{{RUN}}}", "generators {{run}}"),
            Query(f"run:rollmesh_trainer_wait:ratio_rate30m{{{RUN}}}", "trainer {{run}}"),
            least=0,
            most=1,
        ),
        curve(
            "Groups by state",
            "Open: rollouts run. Ready: complete, waiting for a batch. Cut: in a batch, not trained yet.",
            "none",
            Query(f"run:rollmesh_queue_groups:max{{{RUN}}}", "{{state}} {{run}}"),
            stacked=True,
            least=0,
        ),
        curve(
            "Staleness headroom",
            "Train steps that the oldest unclaimed group may still wait; at 0 it blocks the next batch.",
            "none",
            Query(f"run:rollmesh_staleness_headroom_steps:min{{{RUN}}}", "{{run}}"),
            limits=((None, RED), (1, GREEN)),
        ),
        curve(
            "Policy versions",
            "Announced by the trainer, and the oldest and newest served by generators in rotation.",
            "none",
            Query(f"run:rollmesh_policy_version:max{{{RUN}}}", "announced {{run}}"),
            Query(
                f"max by (run) (rollmesh_generator_policy_version{{{RUN}}} and rollmesh_generator_serving == 1)",
                "newest served {{run}}",
            ),
            Query(
                f"min by (run) (rollmesh_generator_policy_version{{{RUN}}} and rollmesh_generator_serving == 1)",
                "oldest served {{run}}",
            ),
        ),
        curve(
            "Reward outcomes",
            "Answers scored per second, timed out, and failed for a fault of the verifier.",
            "ops",
            Query(rate("rollmesh_reward_outcomes_total", by="run, kind"), "{{kind}} {{run}}"),
            least=0,
        ),
    ]
