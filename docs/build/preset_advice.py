"""Use and cost of each preset."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Advice:
    """Advice on one preset, in sentences for docs/schedules.md."""

    use: str
    cost: str


ADVICE = {
    "sync": Advice(
        "The reference for every comparison: each token is on-policy. Use it to check a loss, a verifier or a reward "
        "before any schedule is blamed.",
        "Generators wait for the trainer, and the trainer waits for the longest answer of every batch.",
    ),
    "one_step_off": Advice(
        "Short answers of similar lengths, with about as much time for an update as for a batch.",
        "Every batch after the first is one step old. The longest answer of a batch still blocks it.",
    ),
    "copris": Advice(
        "The default: long and uneven answers, generators that come and go, and a correction by importance sampling.",
        "Finished groups wait for a slow trainer, up to the window: staleness rises to the bound while generators "
        "idle. Lower pool_size or max_staleness then.",
    ),
    "copris_paper": Advice(
        "Results that are compared with the paper's, or generators and trainer on the same devices, one after the "
        "other.",
        "Nothing is generated during an update, and every unfinished answer is pre-filled again after it.",
    ),
    "april": Advice(
        "Generators and trainer on the same devices, with a long tail: twice the prompts start, and a batch takes the "
        "first complete ones.",
        "Long answers are completed over several policies, so they are the off-policy ones, which the importance "
        "ratio corrects: on the demo it learned as `copris` did. The source's code has truncated importance sampling "
        "as an option: `loss: tis` with `old_logprobs: current`.",
    ),
    "sorted": Advice(
        "On-policy training with uneven lengths, where answers are short enough to begin again, and the advantage "
        "needs no group.",
        "Tokens of restarted answers are lost. A batch has answers of similar lengths, so lengths differ from batch "
        "to batch within a wave.",
    ),
    "sorted_partial": Advice(
        "As sorted, with answers too long to begin again.",
        "The long answers of a wave are trained last, and off-policy.",
    ),
    "areal": Advice(
        "A fixed number of requests in flight, with decoupled PPO, which tolerates more staleness.",
        "One more forward pass per batch for the log-probabilities. A group keeps its place until its longest answer "
        "ends.",
    ),
    "pipeline": Advice(
        "Generators that take new weights within an answer (keep_kv): the newest possible tokens at full occupancy.",
        "Tokens after a swap attend to a cache of older weights; no checkpoint reproduces them, so the audit does "
        "not score them again.",
    ),
    "roll": Advice(
        "A hard bound on the age of an answer, where throughput counts more than its longest answers.",
        "Answers that are too slow are dropped. This biases the lengths: watch the drops by length decile.",
    ),
    "ulorl": Advice(
        "Very long answers: each is generated in segments, and finished answers do not wait for the others.",
        "A long answer is written by several policies, one per segment.",
    ),
    "kimi": Advice(
        "Very long answers with a budget of tokens per iteration and answer.",
        "A long answer needs several iterations, and its early segments are off-policy.",
    ),
    "streamrl": Advice(
        "A trainer apart from the generators, whose update takes long: it works on ready groups while the batch "
        "completes.",
        "One step of staleness. Longest first needs prompts that come again; without them the order is admission.",
    ),
    "dart": Advice(
        "Agents and environments with waits: trajectories are independent, and generators reload one at a time.",
        "During a staggered reload some generators serve the older policy.",
    ),
    "rollpacker": Advice(
        "On-policy training with a long tail: short rounds with a quarter more prompts and answers, and a long round "
        "for the late ones now and then.",
        "The surplus and the answers that are set aside lose their tokens. Long prompts come late: watch the drops "
        "and the surplus by length decile.",
    ),
    "flexmarl": Advice(
        "On-policy training where the update takes long beside the generation: gradients are computed while the "
        "batch completes.",
        "The trainer makes several small passes; the last part still waits for the longest answer.",
    ),
}
