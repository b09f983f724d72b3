"""The loop on one page: train the countdown task in one process, with the code of the mesh.

python examples/one_page.py [STEPS]
"""

import sys

from rollmesh.api import Group, Prompt, Sampler, Tokenizer, build_verifier, load_learner, score, train
from rollmesh.config.data import CountdownSource, DataConfig
from rollmesh.config.recipes import resolve_model
from rollmesh.tasks.sources.source_protocol import build_prompt_source

MODEL = "recipe:countdown"  # 250,000 parameters after a warm start, part of the package
GROUPS, MEMBERS = 16, 8
LONGEST_ANSWER = 128
SAMPLE_AHEAD = 1  # batches that are sampled before the step in front of them: 0 is on-policy


def rewards(groups: list[Group]) -> list[float]:
    return [answer.shaped_reward for group in groups for answer in group.trajectories]


def main(steps: int = 20) -> list[float]:
    """Train, and return the mean reward of each step."""
    learner = load_learner(
        MODEL,
        learning_rate=4e-4,
        train_steps=steps,
        algorithm={"advantage": "grpo", "loss": "decoupled_ppo", "old_logprobs": "recompute"},
    )
    tokenizer = Tokenizer(resolve_model(MODEL))
    verifier = build_verifier("countdown", {})
    source = build_prompt_source(DataConfig(source=CountdownSource(type="countdown")), tokenizer, seed=0)
    prompts = iter(source.prompt(0, index) for index in range(source.epoch_size))

    with Sampler(learner, tokenizer, slots=GROUPS * MEMBERS, max_context_tokens=256) as sampler:

        def sampled() -> list[Group]:
            chosen: list[Prompt] = [next(prompts) for _ in range(GROUPS)]
            groups = sampler.groups(chosen, MEMBERS, max_new_tokens=LONGEST_ANSWER)
            return score(groups, verifier.verify, tokenizer)

        means = []
        waiting = [sampled() for _ in range(SAMPLE_AHEAD)]
        for step in range(1, steps + 1):
            # The batches that wait were sampled by older weights; the loss corrects for the difference.
            waiting.append(sampled())
            batch = waiting.pop(0)
            report = train(learner, batch)
            sampler.update()
            means.append(sum(rewards(batch)) / (GROUPS * MEMBERS))
            print(
                f"step {step:3d}  reward {means[-1]:.3f}  loss {report.loss:+.4f}  "
                f"staleness {report.batch.token_staleness.mean:.2f}  ratio {report.policy.ratio.mean:.3f}"
            )
    return means


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
