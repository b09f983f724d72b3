"""A small student learns a small teacher from its own samples, by the real learner and without a mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rollmesh.config.teachers import TeacherObjective
from rollmesh.config.trainer import AlgorithmConfig, TrainerConfig
from rollmesh.trainer.learner.policy_trainer import PolicyTrainer
from rollmesh.types import Batch, Prompt, Segment, TeacherColumn, Trajectory

from ....kit.made_batches import VOCAB, batch_of, trajectory
from .conftest import VERSIONS, ModelMaker

ANSWERS, TOKENS, STEPS = 64, 8, 12


def all_logprobs(folder: Path, ids: Tensor) -> Tensor:
    """Log-probabilities of every token after each of the ids, [answers, tokens, vocab], by transformers alone."""
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(input_ids=ids).logits.log_softmax(-1)


def sampled(folder: Path, step: int) -> Tensor:
    """Answers of the student: a prompt of one token, and what it samples after it."""
    random = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 4, (ANSWERS, 1), generator=random)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for _ in range(TOKENS):
        with torch.no_grad():
            probabilities = model(input_ids=ids).logits[:, -1].softmax(-1)
        ids = torch.cat([ids, torch.multinomial(probabilities, 1, generator=random)], 1)
    return ids


def batch_of_step(ids: Tensor, student: Tensor, teacher: Tensor, step: int, top_k: int) -> Batch:
    """Groups of one answer, with the log-probabilities of the sampler and of the teacher."""

    def of_tokens(scores: Tensor, answer: int) -> np.ndarray:
        return scores[answer, :-1].gather(-1, ids[answer, 1:, None])[:, 0].numpy()

    def answered(answer: int) -> Trajectory:
        tokens, top = ids[answer].numpy().astype(np.int32), teacher[answer, :-1].topk(top_k)
        segment = Segment(
            token_ids=tokens[1:],
            behavior_logprobs=of_tokens(student, answer),
            policy_version=step - 1,
            kv_min_version=step - 1,
        )
        made = trajectory(f"g{answer}.0", [segment])
        column = TeacherColumn(
            teacher="large",
            manifest_digest="0" * 64,
            logprobs=of_tokens(teacher, answer),
            top_ids=top.indices.numpy().astype(np.int32),
            top_logprobs=top.values.numpy(),
        )
        prompt = Prompt(prompt_id=str(answer), token_ids=tokens[:1], verifier="exact")
        return Trajectory(
            trajectory_id=made.trajectory_id,
            group_id=made.group_id,
            member_index=0,
            prompt=prompt,
            segments=made.segments,
            finish_reason=made.finish_reason,
            outcome=made.outcome,
            teacher=column,
        )

    return batch_of(*([answered(answer)] for answer in range(ANSWERS)), train_step=step)


@pytest.mark.parametrize(
    "objective",
    [{"reverse_kl_coefficient": 1.0}, {"forward_kl_coefficient": 1.0}],
    ids=["reverse KL", "forward KL"],
)
def test_the_divergence_from_the_teacher_falls(
    make_model: ModelMaker, tmp_path: Path, objective: dict[str, Any]
) -> None:
    algorithm = AlgorithmConfig(teacher=TeacherObjective(**objective))
    config = TrainerConfig(learning_rate=1e-2, max_grad_norm=10.0, algorithm=algorithm)
    student, teacher = make_model("qwen2"), make_model("qwen2", seed=1)
    trainer, reported, exact = PolicyTrainer(student, config), list[float](), list[float]()
    for step in range(1, STEPS + 1):
        ids = sampled(student, step)
        own, wanted = all_logprobs(student, ids), all_logprobs(teacher, ids)
        exact.append(float((own.exp() * (own - wanted)).sum(-1)[:, :-1].mean()))
        report = trainer.train(batch_of_step(ids, own, wanted, step, 6), VERSIONS | {step - 1: step - 1})
        assert report.batch.reverse_kl is not None
        reported.append(report.batch.reverse_kl)
        trainer.export(student := tmp_path / str(step))
    thirds = [float(np.mean(part)) for part in np.split(np.array(exact), 3)]
    assert thirds[0] > thirds[1] > thirds[2]
    assert exact[-1] < 0.45 * exact[0]
    # What the step reports is an estimate of it from the sampled tokens.
    assert reported == pytest.approx(exact, abs=0.3 * exact[0])
    assert ids.max() < VOCAB
