"""Learning of the policy, the staleness of its data, and the parts of a train step."""

from frame import Page
from panels import ORANGE, RED, Query, above, curve, density, gauge, per_minute, per_second, rate, rule, share

PAGE = Page(
    name="training",
    title="Training and off-policy health",
    description="Rewards, loss and gradients; staleness, ratios and gaps between engine and trainer; time of a step.",
    rows={
        "Learning": [
            curve(
                "Reward",
                "Mean outcome of the batch before shaping, and the shaped reward that was trained on.",
                gauge("rollmesh_trainer_outcome_mean", word="outcome"),
                gauge("rollmesh_trainer_reward_mean", word="reward"),
                least=None,
            ),
            curve(
                "Loss",
                "Loss of the newest step; what it means depends on the algorithm.",
                gauge("rollmesh_trainer_loss"),
                least=None,
            ),
            curve("Gradient norm", "Before clipping.", gauge("rollmesh_trainer_grad_norm")),
            curve("Entropy", "Mean entropy per token, in nats.", gauge("rollmesh_trainer_entropy_nats")),
            curve(
                "Response length",
                "Mean of the batch, in tokens.",
                gauge("rollmesh_trainer_response_length_mean_tokens"),
            ),
            share(
                "Truncated responses",
                "Share of the batch's trajectories that were cut off by the token budget.",
                gauge("rollmesh_trainer_truncated_ratio"),
            ),
            share(
                "Groups without signal",
                "Share of the trained groups whose rewards were all equal, by outcome.",
                Query(
                    f"{rate('rollmesh_trainer_zero_variance_groups_total', 'outcome')}"
                    f" / on (namespace, run) group_left () {rate('rollmesh_trainer_groups_total')}",
                    "{{outcome}} {{run}} {{namespace}}",
                ),
                stacked=True,
            ),
            curve("Learning rate", "Of the newest step.", gauge("rollmesh_trainer_learning_rate"), unit="sci"),
            curve(
                "Skipped updates",
                "Updates per second that were dropped for a gradient that is not finite.",
                per_second("rollmesh_trainer_skipped_updates_total"),
            ),
        ],
        "Off-policy health": [
            share(
                "Effective sample size",
                "Of the importance weights over trajectories, per trajectory: 1 is on-policy.",
                gauge("rollmesh_trainer_effective_sample_ratio"),
                limits=((None, RED), (0.3, "transparent")),
            ),
            curve(
                "Importance ratio",
                "Mean over tokens; it should stay near 1.",
                gauge("rollmesh_trainer_ratio_mean"),
                least=None,
            ),
            share(
                "Clipped, capped, masked",
                "Shares of tokens whose gradient a clip cut, whose weight was capped, and which were outside of the "
                "loss.",
                gauge("rollmesh_trainer_ratio_clipped_ratio", word="clipped"),
                gauge("rollmesh_trainer_ratio_truncated_ratio", word="capped"),
                gauge("rollmesh_trainer_masked_ratio", word="masked"),
            ),
            curve(
                "Masked tokens",
                "Per second, by the first mask that took the token out of the loss.",
                per_second("rollmesh_trainer_masked_tokens_total", "reason"),
            ),
            curve(
                "Skipped trajectories",
                "Per second: their advantage is 0, so they need no pass (skip_zero_advantage).",
                per_second("rollmesh_trainer_skipped_trajectories_total"),
            ),
            share(
                "Replayed",
                "Share of the batch's trajectories that are of replayed groups (trainer.replay).",
                gauge("rollmesh_trainer_replayed_ratio"),
            ),
            curve(
                "Rounds and rollouts of a group",
                "Means: scored trajectories of the groups of the batch, and rounds of all closed groups "
                "(curriculum.planner).",
                gauge("rollmesh_trainer_rollouts_per_group_mean", word="rollouts"),
                gauge("rollmesh_trainer_rounds_per_group_mean", word="rounds"),
                unit="short",
            ),
            curve(
                "Groups drawn by domain",
                "Per second.",
                per_second("rollmesh_trainer_domain_groups_total", "domain"),
            ),
            curve(
                "Completed trajectories by domain",
                "Per second, in ended groups; and those with a positive reward.",
                per_second("rollmesh_trainer_domain_trajectories_total", "domain"),
                per_second("rollmesh_trainer_domain_solved_trajectories_total", "domain", word="solved"),
            ),
            curve(
                "Tokens by domain",
                "Of completed trajectories, per second.",
                per_second("rollmesh_trainer_domain_tokens_total", "domain"),
            ),
            curve(
                "Factor on the learning rate",
                "Of the update scale; 1 without one.",
                gauge("rollmesh_trainer_learning_rate_factor_ratio"),
                unit="short",
            ),
            curve(
                "KL to the behavior policy",
                "Estimators k1 and k3 per token, in nats.",
                gauge("rollmesh_trainer_kl_behavior_k1_nats", word="k1"),
                gauge("rollmesh_trainer_kl_behavior_k3_nats", word="k3"),
                least=None,
            ),
            curve(
                "KL to the teachers",
                "Reverse and forward KL per token in nats, which distillation lowers.",
                gauge("rollmesh_trainer_reverse_kl_nats", word="reverse"),
                gauge("rollmesh_trainer_forward_kl_nats", word="forward"),
                least=None,
            ),
            share(
                "Tokens among the teachers' top tokens",
                "Share of trained tokens.",
                gauge("rollmesh_trainer_top_token_ratio"),
            ),
            curve(
                "Gap between engine and trainer",
                "Mean difference of log-probabilities in nats: on tokens of the current version, where only rounding "
                "should differ, and on tokens that attended to another version's cache.",
                gauge("rollmesh_trainer_logprob_gap_pure_nats", word="pure"),
                gauge("rollmesh_trainer_logprob_gap_mixed_cache_nats", word="mixed cache"),
                limits=above(0.05, RED),
            ),
            curve(
                "Tokens behind the gaps",
                "A gap over few tokens is not significant.",
                gauge("rollmesh_trainer_logprob_gap_pure_tokens", word="pure"),
                gauge("rollmesh_trainer_logprob_gap_mixed_cache_tokens", word="mixed cache"),
            ),
            share(
                "Off-policy tokens",
                "Shares of trained tokens with staleness above 0, and of those with another version's cache.",
                gauge("rollmesh_trainer_off_policy_token_ratio", word="stale"),
                gauge("rollmesh_trainer_mixed_cache_token_ratio", word="mixed cache"),
            ),
            density("Staleness of trained trajectories", "In train steps.", "rollmesh_trainer_staleness_steps"),
            curve(
                "Staleness and span",
                "Mean staleness of trained tokens in train steps, and mean version span within a trajectory.",
                gauge("rollmesh_trainer_token_staleness_mean_steps", word="staleness"),
                gauge("rollmesh_trainer_version_span_mean", word="span"),
            ),
            curve(
                "Old log-probabilities that fell back",
                "Tokens per second whose old log-probability had to be the sampler's, by reason.",
                per_second("rollmesh_trainer_old_logprob_fallbacks_total", "reason"),
            ),
        ],
        "Work": [
            curve(
                "Time of a train step",
                "Seconds by phase, per step over the last moments.",
                Query(
                    f"{rate('rollmesh_trainer_phase_seconds_sum', 'phase')}"
                    f" / on (namespace, run) group_left () {rate('rollmesh_trainer_steps_total')}",
                    "{{phase}} {{run}} {{namespace}}",
                ),
                unit="s",
                stacked=True,
            ),
            share(
                "Trainer waits",
                "Share of the last half hour without a batch.",
                rule("trainer_wait:ratio_rate30m"),
                limits=above(0.5, ORANGE),
            ),
            curve(
                "Trained tokens",
                "Tokens in the numerator of the loss, per second.",
                per_second("rollmesh_trainer_trained_tokens_total"),
            ),
            share(
                "Goodput",
                "Trained tokens per sampled token, since the run began and in the last half hour.",
                gauge("rollmesh_trainer_goodput_ratio", word="whole run"),
                rule("goodput:ratio_rate30m", word="half an hour"),
            ),
            curve(
                "Steps",
                "Train steps per minute, and those replayed after a restart.",
                per_minute("rollmesh_trainer_steps_total", word="steps"),
                per_minute("rollmesh_trainer_replayed_steps_total", word="replayed"),
            ),
            curve("Trajectories", "Trained on, per second.", per_second("rollmesh_trainer_trajectories_total")),
        ],
    },
)
