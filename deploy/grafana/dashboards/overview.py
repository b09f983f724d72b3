"""Health, progress and bottleneck of the run."""

from frame import Page
from panels import GREEN, ONE_OR_MORE, ORANGE, RED, RUN, Query, by_run, curve, gauge, number, per_second, rule, share

PAGE = Page(
    name="overview",
    title="Overview",
    description="One run at a glance: state, progress, learning, throughput and what it waits for.",
    rows={
        "State": [
            number(
                "Leader",
                "Replicas that lead the mesh; without one nothing is admitted or cut.",
                rule("leaders:sum"),
                limits=ONE_OR_MORE,
                words={"0": "none", "1": "leads"},
            ),
            number(
                "Train step",
                "Batches the policy has been trained on.",
                Query(f'run:rollmesh_train_step:max{{{RUN}, kind="trained"}}', "{{run}} {{namespace}}"),
            ),
            number(
                "Done",
                "Share of the run's train steps.",
                Query(
                    f'run:rollmesh_train_step:max{{{RUN}, kind="trained"}}'
                    f' / ignoring (kind) run:rollmesh_train_step:max{{{RUN}, kind="last"}}',
                    "{{run}} {{namespace}}",
                ),
                unit="percentunit",
            ),
            number("Policy version", "Newest announced policy version.", rule("policy_version:max")),
            number("Generators", "Generators in rotation.", rule("serving_generators:sum"), limits=ONE_OR_MORE),
            number(
                "Firing alerts",
                "Alerts of the run that fire now, by any severity.",
                Query(f'count(ALERTS{{alertstate="firing", {RUN}}}) or vector(0)', "alerts"),
                limits=((None, GREEN), (1, ORANGE), (3, RED)),
            ),
            number(
                "At rest",
                "1 while the run is paused by an operator, recovering, failed or complete: no progress is expected.",
                rule("resting:max"),
                limits=((None, GREEN), (1, ORANGE)),
                words={"0": "works", "1": "at rest"},
            ),
            number(
                "Processes up",
                "Share of the run's scrape targets that answer.",
                Query(f"avg {by_run()} (up{{{RUN}}})", "{{run}} {{namespace}}"),
                unit="percentunit",
                limits=((None, RED), (0.8, ORANGE), (1, GREEN)),
            ),
            number(
                "Generated per second",
                "Tokens sampled by all generators.",
                rule("generated_tokens:rate5m"),
                unit="short",
                decimals=0,
            ),
            number(
                "Goodput",
                "Share of the sampled tokens that reached a batch, over half an hour.",
                rule("goodput:ratio_rate30m"),
                unit="percentunit",
                limits=((None, RED), (0.5, ORANGE), (0.8, GREEN)),
            ),
            number(
                "Queue memory",
                "Used memory of Redis plus expected writes, as a share of its maxmemory; admission stops at 80%.",
                rule("store_memory_ratio:max"),
                unit="percentunit",
                limits=((None, GREEN), (0.6, ORANGE), (0.8, RED)),
            ),
            number(
                "Dead letters",
                "Failed trajectories, kept for inspection.",
                rule("dead_letters:max"),
                limits=((None, GREEN), (1, ORANGE)),
            ),
        ],
        "Learning": [
            curve(
                "Reward",
                "Mean outcome of each batch before shaping, and the shaped reward that was trained on.",
                gauge("rollmesh_trainer_outcome_mean", word="outcome"),
                gauge("rollmesh_trainer_reward_mean", word="reward"),
                least=None,
            ),
            curve(
                "Response length",
                "Mean response length of each batch, in tokens.",
                gauge("rollmesh_trainer_response_length_mean_tokens"),
            ),
            share(
                "Health of the updates",
                "Effective sample size per trajectory, and the shares of tokens that were off-policy or cut by a clip.",
                gauge("rollmesh_trainer_effective_sample_ratio", word="effective samples"),
                gauge("rollmesh_trainer_off_policy_token_ratio", word="off-policy tokens"),
                gauge("rollmesh_trainer_ratio_clipped_ratio", word="clipped tokens"),
            ),
        ],
        "Flow": [
            curve(
                "Tokens per second",
                "Sampled by the engines, kept by the rollout workers, trained on.",
                per_second("rollmesh_generator_generated_tokens_total", word="sampled"),
                per_second("rollmesh_rollout_sampled_tokens_total", word="kept"),
                per_second("rollmesh_trainer_trained_tokens_total", word="trained"),
            ),
            share(
                "Waiting",
                "Empty slots of the generators (bubble) and the trainer's time without a batch: the higher one has "
                "slack.",
                rule("bubble:ratio_rate5m", word="generators"),
                rule("trainer_wait:ratio_rate30m", word="trainer"),
            ),
            curve(
                "Groups by state",
                "Open: rollouts run. Ready: complete, waiting for a batch. Cut: in a batch, not trained yet.",
                rule("queue_groups:max", legend="{{state}} {{run}} {{namespace}}"),
                stacked=True,
            ),
            curve(
                "Staleness headroom",
                "Train steps that the oldest unclaimed group may still wait; at 0 it blocks the next batch.",
                rule("staleness_headroom_steps:min"),
                limits=ONE_OR_MORE,
                least=None,
            ),
            curve(
                "Policy versions",
                "Announced by the trainer, and the oldest and newest served by generators in rotation.",
                rule("policy_version:max", word="announced"),
                Query(
                    f"max {by_run()} (rollmesh_generator_policy_version{{{RUN}}} and rollmesh_generator_serving == 1)",
                    "newest served {{run}} {{namespace}}",
                ),
                Query(
                    f"min {by_run()} (rollmesh_generator_policy_version{{{RUN}}} and rollmesh_generator_serving == 1)",
                    "oldest served {{run}} {{namespace}}",
                ),
                least=None,
            ),
            curve(
                "Reward outcomes",
                "Answers scored per second, timed out, and failed by an error of the verifier.",
                per_second("rollmesh_reward_outcomes_total", "kind"),
            ),
        ],
    },
)
