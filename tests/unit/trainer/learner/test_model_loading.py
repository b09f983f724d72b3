"""Models that load for training, models refused by name, and the folders written for generators."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPTJConfig,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    NemotronConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen3MoeConfig,
)

from benchmarks.allocation import peak_bytes
from rollmesh.config.trainer import TrainerConfig
from rollmesh.errors import CheckpointError, ConfigError
from rollmesh.trainer.learner.distributed import World
from rollmesh.trainer.learner.forward_backward import Compute, score_sequences
from rollmesh.trainer.learner.policy_model import load_policy_model
from rollmesh.trainer.learner.policy_trainer import PolicyTrainer

from ....kit.made_batches import SHAPE
from ....kit.trainer_reference import largest_difference, weights_of
from .conftest import ModelMaker

CPU = torch.device("cpu")


def test_a_model_that_carries_state_across_sequences_is_refused(make_model: ModelMaker) -> None:
    folder = make_model(config=MambaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, state_size=4))
    with pytest.raises(ConfigError, match="MambaForCausalLM cannot be packed"):
        load_policy_model(folder, dtype=torch.float32, device=CPU)


ACCEPTED_BUT_WRONG: dict[str, tuple[PretrainedConfig, str]] = {
    "bidirectional": (
        Gemma3TextConfig(**SHAPE, head_dim=8, use_bidirectional_attention=True),
        "Gemma3ForCausalLM .*Gemma3Attention is not causal",
    ),
    "an encoder": (BertConfig(**SHAPE), "BertLMHeadModel .*BertSelfAttention is not causal"),
    "dropped arguments": (
        NemotronConfig(**SHAPE),
        "NemotronForCausalLM .*NemotronAttention drops its attention arguments",
    ),
    "state in some layers": (
        Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"]),
        "Lfm2ForCausalLM cannot be packed",
    ),
    "no attention interface": (
        GPTJConfig(vocab_size=40, n_embd=32, n_layer=1, n_head=4, rotary_dim=8),
        "gptj cannot be packed: it does not use",
    ),
}


@pytest.mark.parametrize("kind", ACCEPTED_BUT_WRONG)
def test_a_new_model_that_ignores_causality_or_drops_its_mask_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    config, message = ACCEPTED_BUT_WRONG[kind]
    write_new_model(tmp_path, config)
    with pytest.raises(ConfigError, match=message):
        load_policy_model(tmp_path, dtype=torch.float32, device=CPU)


def test_packing_is_checked_at_the_lengths_that_the_run_uses(tmp_path: Path) -> None:
    """Attention in chunks is a mask only, which packed attention does not see; up to a chunk there is no difference."""
    sizes = {"num_local_experts": 1, "moe_layers": [], "intermediate_size_mlp": 48, "head_dim": 8}
    write_new_model(tmp_path, Llama4TextConfig(**SHAPE, **sizes, attention_chunk_size=16, no_rope_layers=[1, 1]))
    load_policy_model(tmp_path, dtype=torch.float32, device=CPU, longest=16)
    with pytest.raises(ConfigError, match="Llama4ForCausalLM cannot be packed"):
        load_policy_model(tmp_path, dtype=torch.float32, device=CPU, longest=17)


def test_soft_capped_logits_of_a_new_model_are_no_plain_linear_head(tmp_path: Path) -> None:
    write_new_model(tmp_path, Gemma2Config(**SHAPE, head_dim=8))
    model = load_policy_model(tmp_path, dtype=torch.float32, device=CPU)
    assert not model.linear_head
    own = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    ids = np.arange(3, 30, dtype=np.int32)
    with torch.no_grad():
        for parameter in (*model.causal_lm.parameters(), *own.parameters()):
            parameter.mul_(30.0 if parameter.ndim > 1 else 1.0)
        logits = own(input_ids=torch.from_numpy(ids.astype(np.int64))[None]).logits[0, :-1]
    expected = logits.log_softmax(-1).gather(-1, torch.from_numpy(ids[1:].astype(np.int64))[:, None])[:, 0]
    compute = Compute(device=CPU, world=World(), token_budget=64, autocast=False)
    assert np.abs(score_sequences(model, compute, [ids], 1.0)[0] - expected.numpy()).max() < 1e-4


def test_the_check_of_a_long_window_computes_the_logits_of_one_token(tmp_path: Path) -> None:
    window, words = 512, 100_000
    write_new_model(tmp_path, Gemma2Config(**{**SHAPE, "vocab_size": words}, head_dim=8, sliding_window=window))
    peak = peak_bytes(lambda: load_policy_model(tmp_path, dtype=torch.float32, device=CPU, longest=window + 1))
    assert peak < 4 * window * words / 2


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_with_the_tensor_and_no_word_of_the_learning_rate(
    make_model: ModelMaker, tmp_path: Path, value: float
) -> None:
    folder = make_model()
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.model.layers[0].mlp.up_proj.weight.data[1, 2] = value
    model.save_pretrained(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"layers\.0\.mlp\.up_proj\.weight has values that are not finite"
    ) as caught:
        PolicyTrainer(tmp_path, TrainerConfig(device="cpu"))
    assert caught.value.final and "learning_rate" not in str(caught.value)


ROPE: dict[str, dict[str, Any]] = {
    "longrope": {"short_factor": [1.0] * 4, "long_factor": [8.0] * 4},
    "dynamic": {"factor": 4.0},
}


@pytest.mark.parametrize("kind", ROPE)
def test_rope_that_depends_on_the_longest_neighbour_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 10_000.0, **ROPE[kind]}
    if kind == "dynamic":
        config: PretrainedConfig = LlamaConfig(**{**SHAPE, "max_position_embeddings": 32}, rope_parameters=rope)
    else:
        config = Phi3Config(**SHAPE, pad_token_id=0, rope_parameters=rope, original_max_position_embeddings=32)
    write_new_model(tmp_path, config)
    trainer = PolicyTrainer(tmp_path, TrainerConfig())
    short, whole, beyond = (np.arange(3, 3 + n, dtype=np.int32) % 40 for n in (9, 33, 40))
    (alone,), (beside, _) = trainer.logprobs([short]), trainer.logprobs([short, whole])
    np.testing.assert_allclose(alone, beside, atol=1e-6)
    with pytest.raises(ConfigError, match=f"sequence tokens=39: rope_type={kind} .* at most 32"):
        trainer.logprobs([short, beyond])
    with pytest.raises(ConfigError, match=f"generator.max_context_tokens=33: rope_type={kind}"):
        load_policy_model(tmp_path, dtype=torch.float32, device=CPU, longest=33)


def write_new_model(folder: Path, config: PretrainedConfig) -> None:
    """A model as it is made from scratch: with the small weights of its own initialisation."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def test_a_mixture_of_experts_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    Qwen3MoeConfig(**SHAPE, num_experts=4).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="routes tokens to 4 experts"):
        load_policy_model(tmp_path, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "with an unknown .*k_proj.bias"),
        ({"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}, "without model.layers.2.*"),
        ({"intermediate_size": 24}, "with another shape of model.layers.0.mlp"),
        ({"num_hidden_layers": "two"}, "not a loadable causal LM"),
    ],
)
def test_weights_of_another_architecture_are_never_filled_with_noise_or_left_out(
    make_model: ModelMaker, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    folder = shutil.copytree(make_model("qwen2"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(CheckpointError, match=message):
        load_policy_model(folder, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("name", ["qwen2", "llama"])
def test_an_exported_folder_loads_like_the_original(make_model: ModelMaker, tmp_path: Path, name: str) -> None:
    source = make_model(name)
    PolicyTrainer(source, TrainerConfig()).export(tmp_path)
    assert largest_difference(weights_of(tmp_path), weights_of(source)) == 0
    assert (tmp_path / "tokenizer.json").read_text() == "{}"
    written, original = (json.loads((f / "config.json").read_text()) for f in (tmp_path, source))
    assert written == {**original, "dtype": "float32"}
    kept = {p.name for p in source.iterdir()}
    assert {p.name for p in tmp_path.iterdir()} == kept
