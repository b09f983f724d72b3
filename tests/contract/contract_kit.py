"""Tiny models, calls and reference numbers of the engine contract, and the servers that it is held to."""

import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import httpx
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache, LlamaConfig, Qwen3Config

from rollmesh.runtime.addresses import free_port
from rollmesh.types import Chunk, Float32Array, Int32Array

from ..kit import models
from ..kit.generation import VOCAB, load_model

EOS = 7
"""The models' own end token: it ends a call only if the call says so."""
LONGEST = 256
POSITIONS = 1024
"""Context of the models and of the server; the engines under contract are limited to ``LONGEST`` tokens of it."""
KEY = "contract"
WAIT_SECONDS = 180.0
"""Seconds for what takes one on an idle machine."""
FAKES = Path(__file__).parents[1] / "fakes"


def write_model(folder: Path, seed: int, hidden_size: int = 48) -> Path:
    """A random Qwen3 whose distributions are neither flat nor certain."""
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=hidden_size,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
        max_position_embeddings=POSITIONS,
        eos_token_id=EOS,
    )
    return models.write_model(folder, config, seed)


def write_draft(folder: Path, seed: int) -> Path:
    """A random EAGLE-3 draft model for ``write_model``: its drafts are accepted as often as chance has it."""
    hidden, heads, kv_heads, head, mlp = 48, 4, 2, 16, 64
    random = torch.Generator().manual_seed(seed)
    shapes = {
        "fc": (hidden, 3 * hidden),
        "lm_head": (VOCAB, hidden),
        "midlayer.self_attn.q_proj": (heads * head, 2 * hidden),
        "midlayer.self_attn.k_proj": (kv_heads * head, 2 * hidden),
        "midlayer.self_attn.v_proj": (kv_heads * head, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, heads * head),
        "midlayer.mlp.gate_proj": (mlp, hidden),
        "midlayer.mlp.up_proj": (mlp, hidden),
        "midlayer.mlp.down_proj": (hidden, mlp),
    }
    norms = ("norm", *(f"midlayer.{name}" for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")))
    weights = {f"{name}.weight": 0.2 * torch.randn(shape, generator=random) for name, shape in shapes.items()}
    weights |= {f"{name}.weight": torch.ones(hidden) for name in norms}
    config = LlamaConfig(
        architectures=["LlamaForCausalLMEagle3"],
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head,
        max_position_embeddings=POSITIONS,
        draft_vocab_size=VOCAB,
        eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 1]},
        dtype="float32",
    )
    config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_nan(folder: Path) -> None:
    """Replace every weight of a saved model by NaN."""
    weights = load_file(folder / "model.safetensors")
    broken = {name: torch.full_like(tensor, float("nan")) for name, tensor in weights.items()}
    save_file(broken, folder / "model.safetensors", metadata={"format": "pt"})


def hf_greedy(folder: Path, context: Int32Array, count: int) -> Int32Array:
    ids = torch.from_numpy(context.astype(np.int64))[None]
    with torch.inference_mode():
        for _ in range(count):
            ids = torch.cat([ids, load_model(folder)(ids).logits[:, -1:].argmax(-1)], dim=1)
    return ids[0, len(context) :].numpy().astype(np.int32)


def hf_mixed_logprobs(folders: Iterable[Path], context: Int32Array, chunks: list[Chunk]) -> Float32Array:
    """Log-probabilities of sampled tokens when the weights change and the cache stays, float32 [tokens].

    The key and value of a token are computed in the step that it is the input of, by the weights of that step.
    """
    by_version = dict(enumerate(folders))
    cache, inputs, found = DynamicCache(), context, [np.empty(0, np.float32)]
    with torch.inference_mode():
        for chunk in (c for c in chunks if len(c.token_ids)):
            fed = np.concatenate((inputs, chunk.token_ids[:-1])).astype(np.int64)
            logits = load_model(by_version[chunk.policy_version])(
                torch.from_numpy(fed)[None], past_key_values=cache, use_cache=True
            ).logits[0, -len(chunk.token_ids) :]
            tokens = torch.from_numpy(chunk.token_ids.astype(np.int64))[:, None]
            found.append(torch.log_softmax(logits, -1).gather(1, tokens).squeeze(1).numpy())
            inputs = chunk.token_ids[-1:]
    return np.concatenate(found)


class StandIn:
    """The fast stand-in for the SGLang server, as a process."""

    def __init__(self, model: Path, log: Path, arguments: Iterable[str] = ()) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        self._command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--port", str(port)]
        self._command += ["--admin-api-key", KEY, "--context-length", str(LONGEST + 8), *arguments]
        self._start()

    def _start(self) -> None:
        environment = os.environ | {"PYTHONPATH": str(FAKES), "OMP_NUM_THREADS": "1"}
        with self._log.open("ab") as out:
            self.process = subprocess.Popen(self._command, env=environment, stdout=out, stderr=out)
        deadline = time.monotonic() + WAIT_SECONDS
        while not self._ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise AssertionError(f"the stand-in does not start:\n{self._log.read_text()}")
            time.sleep(0.05)

    def _ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready").status_code == 200
        except httpx.TransportError:
            return False

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        """Replace the process by a new one at the same address."""
        self.stop()
        self._start()
