"""Random tiny models and ragged batches."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from rollmesh.types import (
    Batch,
    FinishReason,
    Group,
    Int32Array,
    KeptSets,
    OutcomeKind,
    Prompt,
    RewardOutcome,
    Segment,
    SegmentSource,
    TeacherColumn,
    Trajectory,
)

from .models import write_model

VOCAB = 40
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "qwen2": lambda: Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**SHAPE, head_dim=8, tie_word_embeddings=True),
    "llama": lambda: LlamaConfig(**SHAPE),
}


def write_random_model(
    folder: Path, name: str = "qwen2", seed: int = 0, config: PretrainedConfig | None = None
) -> None:
    """A random model of this architecture, or of ``config``, with a tokenizer file beside it."""
    write_model(folder, config or CONFIGS[name](), seed, scale=3.0, shift=0.0)
    (folder / "tokenizer.json").write_text("{}")


def policy_segment(
    rng: np.random.Generator,
    length: int,
    version: int = 0,
    *,
    kv_min_version: int | None = None,
    temperature: float = 1.0,
) -> Segment:
    """Random tokens with plausible logprobs."""
    return Segment(
        token_ids=rng.integers(0, VOCAB, length).astype(np.int32),
        behavior_logprobs=-rng.uniform(2.5, 4.5, length).astype(np.float32),
        policy_version=version,
        kv_min_version=version if kv_min_version is None else kv_min_version,
        temperature=temperature,
    )


def environment_segment(rng: np.random.Generator, length: int) -> Segment:
    """Random tokens that no policy wrote."""
    return Segment(
        token_ids=rng.integers(0, VOCAB, length).astype(np.int32),
        behavior_logprobs=None,
        policy_version=0,
        kv_min_version=0,
        source=SegmentSource.ENVIRONMENT,
    )


def trajectory(
    name: str,
    segments: list[Segment],
    reward: float = 0.0,
    *,
    prompt: int | Int32Array = 4,
    outcome: RewardOutcome | None = None,
    finish: FinishReason = FinishReason.STOP,
) -> Trajectory:
    """A finished trajectory after a prompt, or one of so many tokens; its group is the name before the dot."""
    group = name.partition(".")[0]
    if isinstance(prompt, int):
        rng = np.random.default_rng(len(name) + prompt)
        prompt = rng.integers(0, VOCAB, prompt).astype(np.int32)
    return Trajectory(
        trajectory_id=name,
        group_id=group,
        member_index=int(name.partition(".")[2]),
        prompt=Prompt(prompt_id=group, token_ids=prompt, verifier="exact"),
        segments=tuple(segments),
        finish_reason=finish,
        outcome=outcome or RewardOutcome(kind=OutcomeKind.SCORED, value=reward),
        shaped_reward=reward,
    )


def batch_of(*groups: list[Trajectory], train_step: int = 1) -> Batch:
    """A batch of these groups."""
    return Batch(
        train_step=train_step,
        groups=tuple(
            Group(group_id=members[0].group_id, admission_index=i, trajectories=tuple(members))
            for i, members in enumerate(groups)
        ),
    )


def random_batch(
    seed: int, *, groups: int = 4, members: int = 3, train_step: int = 1, longest: int = 24, versions: int = 1
) -> Batch:
    """Ragged trajectories with mixed versions up to ``train_step - 1`` and some environment tokens."""
    rng = np.random.default_rng(seed)
    newest = train_step - 1
    built = []
    for g in range(groups):
        group = []
        for m in range(members):
            segments = [
                policy_segment(rng, int(rng.integers(1, longest)), max(0, newest - back))
                for back in reversed(range(int(rng.integers(1, versions + 1))))
            ]
            if rng.random() < 0.4:
                segments.insert(1, environment_segment(rng, int(rng.integers(1, 4))))
            group.append(trajectory(f"g{g}.{m}", segments, float(rng.integers(0, 2)), prompt=int(rng.integers(1, 7))))
        built.append(group)
    return batch_of(*built, train_step=train_step)


def forked_groups(seed: int, count: int = 2) -> list[list[Trajectory]]:
    """Groups of one prompt, forks that share turns of the policy, and single trajectories.

    A member may be the whole beginning of another one, or equal to it. Some turns have a temperature of their own.
    """
    rng, groups = np.random.default_rng(seed), []
    for group in range(count):
        grown: list[list[Segment]] = []
        for _ in range(int(rng.integers(1, 6))):
            other = grown[int(rng.integers(len(grown)))] if grown else []
            segments = other[: int(rng.integers(len(other) + 1))]
            if segments and rng.random() < 0.5:
                segments = [*segments, environment_segment(rng, int(rng.integers(1, 4)))]
            if not segments or rng.random() < 0.8:
                cool = 0.7 if rng.random() < 0.3 else 1.0
                segments = [*segments, policy_segment(rng, int(rng.integers(1, 9)), temperature=cool)]
            grown.append(segments)
        prompt = int(rng.integers(1, 9))
        groups.append([trajectory(f"f{group}.{m}", s, float(m % 2), prompt=prompt) for m, s in enumerate(grown)])
    return groups


def with_kept_sets(batch: Batch, seed: int, *, full: float = 0.0) -> Batch:
    """The batch with a random kept set for each token that a policy wrote, but for a share ``full`` of them."""
    rng = np.random.default_rng(seed)

    def truncated(segment: Segment) -> Segment:
        if segment.source is not SegmentSource.POLICY:
            return segment
        sets = [np.union1d(rng.integers(0, VOCAB, rng.integers(0, 8)), token) for token in segment.token_ids]
        sets = [[] if rng.random() < full else each.tolist() for each in sets]
        return replace(segment, kept_sets=sets_of(sets))

    def member(trajectory: Trajectory) -> Trajectory:
        return replace(trajectory, segments=tuple(truncated(s) for s in trajectory.segments))

    groups = [replace(g, trajectories=tuple(member(t) for t in g.trajectories)) for g in batch.groups]
    return replace(batch, groups=tuple(groups))


def with_teacher(batch: Batch, seed: int, top_k: int = 0) -> Batch:
    """The batch with a column of one random teacher for each response."""
    rng = np.random.default_rng(seed)

    def column(trajectory: Trajectory) -> TeacherColumn:
        ids = trajectory.response_ids
        logits = rng.normal(0, 2, (len(ids), VOCAB))
        logprobs = (logits - np.log(np.exp(logits).sum(-1, keepdims=True))).astype(np.float32)
        top = np.argsort(-logprobs, -1)[:, :top_k].astype(np.int32)
        return TeacherColumn(
            teacher="large",
            manifest_digest="0" * 64,
            logprobs=logprobs[np.arange(len(ids)), ids],
            top_ids=top if top_k else None,
            top_logprobs=np.take_along_axis(logprobs, top, -1) if top_k else None,
        )

    members = [[replace(t, teacher=column(t)) for t in g.trajectories] for g in batch.groups]
    return batch_of(*members, train_step=batch.train_step)


def sets_of(lists: list[list[int]]) -> KeptSets:
    """Kept sets of tokens in order, each a list of ids; an empty one for the full vocabulary."""
    flat = [token for each in lists for token in each]
    return KeptSets(counts=np.array([len(each) for each in lists], np.int32), ids=np.array(flat, np.int32))
