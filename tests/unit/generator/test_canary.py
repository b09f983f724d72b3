"""The canary passes the trainer's own weights in every dtype, and catches others."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from rollmesh.config.generator import GeneratorConfig
from rollmesh.config.load import validate_run_config
from rollmesh.config.recipes import resolve_model
from rollmesh.config.trainer import TrainerConfig
from rollmesh.generator.canary import Canary, CanaryFailed, CanaryScores
from rollmesh.generator.engines.torch.torch_engine import TorchEngine
from rollmesh.trainer.learner.policy_trainer import PolicyTrainer
from rollmesh.trainer.service.publishing import canary_sequences


def threshold(dtype: str, **generator: float) -> float:
    data = {"name": "run", "folder": "run", "model": {"path": "model", "dtype": dtype}, "generator": generator}
    return Canary.from_config(validate_run_config(data, "made")).threshold


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_the_canary_lets_own_weights_pass_and_refuses_others(tmp_path: Path, dtype: str) -> None:
    trainer = PolicyTrainer(resolve_model("recipe:countdown"), TrainerConfig(device="cpu"), dtype=dtype)
    canary = canary_sequences(96)
    expected = np.concatenate(trainer.logprobs(canary))
    trainer.export(tmp_path / "own")
    with torch.no_grad():
        for name, tensor in trainer.state_tensors().items():
            if name.endswith("o_proj.weight"):
                tensor.neg_()
    trainer.export(tmp_path / "other")
    gaps = {}
    for which in ("own", "other"):
        engine = TorchEngine(GeneratorConfig(slots=8, max_context_tokens=64, device="cpu"), dtype)
        await engine.start(tmp_path / which, 0)
        gaps[which] = np.abs(np.concatenate(await engine.score(canary)) - expected).max()
        await engine.aclose()
    assert gaps["own"] <= threshold(dtype) < gaps["other"]


def scores(version: int, own: float, theirs: float, weights: str = "") -> CanaryScores:
    tokens = np.array([-1.0, -2.0, -3.0])
    digests = frozenset({weights or str(version)})
    return CanaryScores(
        policy_version=version, engine_logprobs=tokens + own, trainer_logprobs=tokens + theirs, weights=digests
    )


def test_an_engine_that_stays_where_the_trainer_moved_is_refused_though_it_is_near_enough() -> None:
    canary = Canary(threshold=0.5, min_change=0.02)
    canary.check(scores(0, 0.0, 0.0))
    canary.check(scores(1, 0.0, 0.015))  # lost in rounding
    with pytest.raises(CanaryFailed, match="policy version 2: its weights were not delivered .* from version 0 on"):
        canary.check(scores(2, 0.001, 0.03))
    canary.check(scores(3, 0.04, 0.045))
    canary.check(scores(4, 0.04, 0.045))
    with pytest.raises(CanaryFailed, match="differ by nan"):
        canary.check(scores(5, float("nan"), 0.1))


def test_the_same_weights_published_again_pass_though_the_trainer_rounds_otherwise() -> None:
    canary = Canary(threshold=5e-3, min_change=1e-6)
    canary.check(scores(3, 0.0, 0.0, "same"))
    canary.check(scores(4, 0.0, 1e-5, "same"))
    with pytest.raises(CanaryFailed, match="from version 3 on"):
        canary.check(scores(5, 0.0, 1e-5, "other"))


@pytest.mark.parametrize(
    ("trainer", "engine", "passes"),
    [
        ([1e-3, -1e-3, 1e-3], [1.01e-3, -1e-3, 1e-3], True),
        ([1e-3, -1e-3, 1e-3], [1e-3, 0.0, 0.0], False),  # a part of the adapter
        ([1e-3, -1e-3, 1e-3], [0.5e-3, -0.5e-3, 0.5e-3], False),  # half of its scale
        ([1e-3, -1e-3, 1e-3], [3e-3, -3e-3, 3e-3], False),
        ([1e-5, -1e-5, 1e-5], [1e-5, 0.0, 2.5e-5], True),  # less than rounding
    ],
)
def test_an_adapter_changes_the_engine_by_what_it_changes_the_trainer(trainer, engine, passes) -> None:
    canary = Canary(threshold=5e-3, min_change=1e-6, change_noise=2e-5)
    canary.check(scores(0, 1e-5, 0.0))
    own = dataclasses.replace(
        scores(1, 1e-5, 0.0),
        engine_logprobs=scores(0, 1e-5, 0.0).engine_logprobs + np.array(engine),
        trainer_logprobs=scores(0, 0.0, 0.0).trainer_logprobs + np.array(trainer),
    )
    canary.check(own)  # full weights: an engine may round a part of an update away
    canary = Canary(threshold=5e-3, min_change=1e-6, change_noise=2e-5)
    canary.check(scores(0, 1e-5, 0.0))
    adapter = dataclasses.replace(own, is_adapter=True)
    if passes:
        canary.check(adapter)
    else:
        with pytest.raises(CanaryFailed, match="policy version 1: the engine computes another adapter: from version 0"):
            canary.check(adapter)


def test_a_threshold_in_the_run_file_wins() -> None:
    assert threshold("bfloat16", canary_threshold=0.01) == 0.01
