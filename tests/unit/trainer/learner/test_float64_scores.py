"""The judge of the audit computes in float64, norms included, with the rotary tables that transformers computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen3Config

from rollmesh.trainer.learner.policy_scorer import PolicyScorer

_SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
CONFIGS = {
    "llama": LlamaConfig(**_SHAPE),
    "qwen3": Qwen3Config(**_SHAPE, head_dim=8),
}


def made_model(name: str) -> PreTrainedModel:
    """A random model whose distributions are far from uniform."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5.0 if parameter.ndim > 1 else 1.0)
    return model.eval()


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight.double() * x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


@torch.no_grad()
def written_out(model: PreTrainedModel, ids: np.ndarray) -> np.ndarray:
    """The same forward pass from its formulas, float64 but for the angles; float64 [tokens - 1]."""
    inner, config = model.model, model.config
    eps, tokens = config.rms_norm_eps, torch.from_numpy(ids.astype(np.int64))
    angles = torch.arange(len(ids), dtype=torch.float32)[:, None] * inner.rotary_emb.inv_freq
    cos, sin = (torch.cat([table, table], -1).double() for table in (angles.cos(), angles.sin()))
    x = inner.embed_tokens.weight.double()[tokens]
    hidden_from = torch.ones(len(ids), len(ids), dtype=torch.bool).triu(1)
    for layer in inner.layers:
        attention, normed = layer.self_attn, norm(x, layer.input_layernorm.weight, eps)
        parts = []
        for name in ("q", "k", "v"):
            heads = (normed @ getattr(attention, f"{name}_proj").weight.double().T).unflatten(
                -1, (-1, attention.head_dim)
            )
            if name != "v":
                if hasattr(attention, f"{name}_norm"):
                    heads = norm(heads, getattr(attention, f"{name}_norm").weight, eps)
                heads = rotated(heads, cos[:, None], sin[:, None])
            parts.append(heads.transpose(0, 1))
        q, k, v = parts[0], *(part.repeat_interleave(2, 0) for part in parts[1:])
        weights = (q @ k.transpose(1, 2) / attention.head_dim**0.5).masked_fill(hidden_from, -torch.inf).softmax(-1)
        x = x + (weights @ v).transpose(0, 1).flatten(1) @ attention.o_proj.weight.double().T
        normed, mlp = norm(x, layer.post_attention_layernorm.weight, eps), layer.mlp
        gate = normed @ mlp.gate_proj.weight.double().T
        up = normed @ mlp.up_proj.weight.double().T
        x = x + (gate * gate.sigmoid() * up) @ mlp.down_proj.weight.double().T
    logits = norm(x, inner.norm.weight, eps) @ model.lm_head.weight.double().T
    return logits[:-1].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0].numpy()


@pytest.mark.parametrize("name", CONFIGS)
def test_the_float64_judge_computes_norms_in_float64_and_keeps_the_rotary_tables_of_float32(
    tmp_path: Path, name: str
) -> None:
    model = made_model(name)
    model.save_pretrained(tmp_path)
    ids = np.random.default_rng(3).integers(0, 61, 600).astype(np.int32)
    judge = PolicyScorer.from_folder(tmp_path, device="cpu", dtype=torch.float64)
    (scores,) = judge.logprobs([ids])
    np.testing.assert_allclose(scores, written_out(model, ids), atol=1e-11)


def test_the_resolution_knows_that_float32_rounds_the_angles_of_late_positions(tmp_path: Path) -> None:
    made_model("llama").save_pretrained(tmp_path)
    ids = np.tile(np.random.default_rng(3).integers(0, 61, 30), 30).astype(np.int32)
    judge = PolicyScorer.from_folder(tmp_path, device="cpu", dtype=torch.float64)
    before = judge.logprobs([ids])[0]
    (resolution,) = judge.resolution([ids])
    assert resolution.shape == before.shape and resolution.min() > 0
    early, late = resolution[30:150].mean(), resolution[-120:].mean()
    assert late > 1.5 * early, (early, late)
    np.testing.assert_array_equal(judge.logprobs([ids])[0], before, "weights and positions are put back")


def test_a_float32_scorer_has_no_resolution(tmp_path: Path) -> None:
    made_model("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="needs a scorer with dtype=torch.float64"):
        PolicyScorer.from_folder(tmp_path, device="cpu").resolution([np.array([1, 2], np.int32)])
