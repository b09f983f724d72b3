"""The audit of a sharp policy, for many of whose tokens float32 tells little: its own rounding, and faults."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from rollmesh.report.audit_result import GAP_BOUNDS, RESOLUTION_FACTOR
from rollmesh.report.rescore import Gaps
from rollmesh.trainer.learner.policy_scorer import PolicyScorer
from rollmesh.types import Float64Array

BOUND = GAP_BOUNDS["float32"].token
SEQUENCES = [np.random.default_rng(seed).integers(0, 61, 300).astype(np.int32) for seed in range(4)]
SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A policy whose attention and MLPs are close to steps, and its weights after a change of one in ten thousand."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE, tie_word_embeddings=False), dtype=torch.float32)
    folders = (tmp_path_factory.mktemp("policy"), tmp_path_factory.mktemp("next"))
    with torch.no_grad():
        for scale, noise, folder in zip((24.0, 1.0), (0.0, 1e-4), folders, strict=True):
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(scale * (1 + noise * torch.randn_like(parameter)))
            model.save_pretrained(folder)
    return folders


@pytest.fixture(scope="module")
def judge(policies: tuple[Path, Path]) -> PolicyScorer:
    return PolicyScorer.from_folder(policies[0], device="cpu", dtype=torch.float64)


@pytest.fixture(scope="module")
def resolution(judge: PolicyScorer) -> Float64Array:
    return np.concatenate(judge.resolution(SEQUENCES))


def judged(judge: PolicyScorer, resolution: Float64Array, sampled: list[np.ndarray]) -> tuple[int, int]:
    """(tokens found, tokens excused) of these log-probabilities."""
    values = np.abs(np.concatenate(judge.logprobs(SEQUENCES)) - np.concatenate(sampled))
    found, excused = Gaps(values=values, resolution=resolution).over(BOUND)
    return found, len(excused)


def test_no_token_of_a_correct_float32_program_is_found(
    policies: tuple[Path, Path], judge: PolicyScorer, resolution: Float64Array
) -> None:
    assert RESOLUTION_FACTOR * resolution.max() > 100 * BOUND, "float32 tells little of some tokens"
    own = PolicyScorer.from_folder(policies[0], device="cpu").logprobs(SEQUENCES)
    assert judged(judge, resolution, own)[0] == 0


def test_another_policy_is_found_although_float32_excuses_some_of_its_tokens(
    policies: tuple[Path, Path], judge: PolicyScorer, resolution: Float64Array
) -> None:
    other = PolicyScorer.from_folder(policies[1], device="cpu").logprobs(SEQUENCES)
    found, excused = judged(judge, resolution, other)
    assert found > 300 and excused > 0


def test_another_temperature_and_a_context_that_lacks_a_token_are_found(
    policies: tuple[Path, Path], judge: PolicyScorer, resolution: Float64Array
) -> None:
    scorer = PolicyScorer.from_folder(policies[0], device="cpu")
    assert judged(judge, resolution, scorer.logprobs(SEQUENCES, 1.001))[0] > 300
    shifted = [np.append(scores, 0.0) for scores in scorer.logprobs([ids[1:] for ids in SEQUENCES])]
    assert judged(judge, resolution, [np.roll(scores, 1) for scores in shifted])[0] > 300
