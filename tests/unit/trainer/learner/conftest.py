"""One thread, quiet transformers, and tiny models on disk."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PretrainedConfig
from transformers.utils.logging import disable_progress_bar

from rollmesh.config.model import AdapterConfig
from rollmesh.config.trainer import TrainerConfig
from rollmesh.trainer.learner.policy_scorer import PolicyScorer
from rollmesh.trainer.learner.policy_trainer import PolicyTrainer
from rollmesh.types import Trajectory

from ....kit.made_batches import VOCAB, random_batch, write_random_model
from ....kit.trainer_reference import weights_of

ModelMaker = Callable[..., Path]

VERSIONS = {version: version for version in range(20)}
"""Each train step published the version of its number."""
IDS = [np.random.default_rng(3).integers(0, VOCAB, n).astype(np.int32) for n in (9, 17)]


NOTHING: Mapping[Any, Any] = MappingProxyType({})


def make_trainer(
    folder: Path,
    adapter: AdapterConfig | None = None,
    *,
    exact: bool = False,
    dtype: str = "float32",
    kept: Mapping[int, Path] = NOTHING,
    max_token_staleness: int | None = None,
    algorithm: Mapping[str, Any] = NOTHING,
    **fields: Any,
) -> PolicyTrainer:
    """A trainer with a rate of 0.01, in float64 if ``exact``; ``kept`` has the folders of earlier versions."""
    config = TrainerConfig.model_validate({"learning_rate": 1e-2, **fields, "algorithm": dict(algorithm)})
    precision: dict[str, Any] = {"dtype": "float64", "compute_dtype": torch.float64} if exact else {"dtype": dtype}
    bound = {"max_token_staleness": max_token_staleness, "policy_folder": kept.get}
    return PolicyTrainer(folder, config, adapter=adapter, **bound, **precision)


def trained(trainer: PolicyTrainer, steps: int = 2) -> PolicyTrainer:
    """The trainer after further steps on random batches."""
    for step in range(trainer.train_step + 1, trainer.train_step + 1 + steps):
        trainer.train(random_batch(step, train_step=step), VERSIONS)
    return trainer


def response_scores(scorer: PolicyTrainer | PolicyScorer, member: Trajectory) -> np.ndarray:
    """Log-probabilities of the response of a trajectory."""
    ids = np.concatenate([member.prompt.token_ids, member.response_ids]).astype(np.int32)
    return scorer.logprobs([ids])[0][len(member.prompt.token_ids) - 1 :]


def exported(trainer: PolicyTrainer, folder: Path) -> dict[str, torch.Tensor]:
    trainer.export(folder)
    return weights_of(folder)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    disable_progress_bar()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> ModelMaker:
    """``make_model("qwen2", seed=1)`` is the folder of that model, written once; ``config`` overrides the name."""
    known: dict[tuple[str, int], Path] = {}

    def make(name: str = "qwen2", seed: int = 0, config: PretrainedConfig | None = None) -> Path:
        if config is not None:
            folder = tmp_path_factory.mktemp("model")
            write_random_model(folder, seed=seed, config=config)
            return folder
        if (name, seed) not in known:
            known[name, seed] = tmp_path_factory.mktemp(name)
            write_random_model(known[name, seed], name, seed)
        return known[name, seed]

    return make
