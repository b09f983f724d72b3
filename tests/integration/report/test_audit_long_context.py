"""The audit's judgement of a correct engine, at positions where a wrong last bit of a RoPE frequency shows."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, Qwen2Config

from rollmesh.config.generator import GeneratorConfig
from rollmesh.generator.engines.torch.torch_engine import TorchEngine
from rollmesh.report.rescore import gaps_of_version
from rollmesh.trainer.learner.policy_scorer import PolicyScorer
from rollmesh.types import GenerationCall, SamplingParams

from ...kit.made_batches import trajectory
from ...kit.models import write_model
from ...kit.records import segments_of

VOCAB = 61
POSITIONS = 8192
TOKENS = 96
_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": POSITIONS,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}


@pytest.mark.parametrize(
    "config",
    [
        Qwen2Config(**_SHAPE, rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}),
        LlamaConfig(**_SHAPE, rope_parameters=dict(_LLAMA3)),
    ],
    ids=["default", "llama3"],
)
async def test_a_correct_engine_passes_the_audit_at_8k_positions(tmp_path, config):
    folder = write_model(tmp_path / "policy", config, scale=16.0, shift=0.0)
    prompt = np.random.default_rng(3).integers(0, VOCAB, POSITIONS - TOKENS).astype(np.int32)
    call = GenerationCall(
        trajectory_id="t",
        context_ids=prompt,
        prompt_token_count=len(prompt),
        max_new_token_count=TOKENS,
        sampling=SamplingParams(seed=1),
        chunk_token_count=TOKENS,
    )
    engine = TorchEngine(GeneratorConfig(slots=1, max_context_tokens=POSITIONS, device="cpu"))
    try:
        await engine.start(folder, 0)
        chunks = [chunk async for chunk in engine.generate(call)]
    finally:
        await engine.aclose()
    scorer = PolicyScorer.from_folder(folder, device="cpu", tokens_per_microbatch=POSITIONS)
    exact = PolicyScorer.from_folder(folder, device="cpu", dtype=torch.float64, tokens_per_microbatch=POSITIONS)
    gaps = gaps_of_version(scorer, 0, [trajectory("g.0", segments_of(chunks), prompt=prompt)], lambda: exact)
    assert len(gaps.values) == TOKENS
    # Rounding is some 3e-5 here, a wrong last bit of every frequency 4e-3 and more.
    assert gaps.values.max() < 1.5e-4
