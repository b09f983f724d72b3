"""Costs of engines and trainers that were not measured, from sizes of models and a GPU's public figures.

A decode step of r calls with C context tokens on t devices with tensor parallelism takes

    o + max(w, p * r) + c * C,    w = 2 M / (t * m * bandwidth),    p = 2 M / (t * f * flops),
                                  c = cache bytes per token and device / (m * bandwidth)

seconds, where M weights of 2 bytes are read once per step and multiplied once per token (2 FLOPs each). m and f are the
shares of the peak rates that real programs reach, o is the engine's own time per step. These three are the same for all
GPUs and models: none is fitted to a published result. Left out: attention FLOPs, activations' memory, and communication
between the devices of a tensor-parallel group.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rollmesh.errors import ConfigError
from rollmesh.generator.engines.torch.architecture import Architecture, architecture_from_config, read_architecture
from rollmesh.sim.decode_curve import EngineCosts

WEIGHT_BYTES = 2
"""Bytes of a bf16 number: weights and cache of the engines."""
ALIASES: Mapping[str, str] = {
    "0.5b": "qwen2.5-0.5b",
    "1.5b": "r1-distill-qwen-1.5b",
    "7b": "qwen2.5-7b",
    "8b": "qwen3-8b",
    "14b": "qwen2.5-14b",
    "32b": "qwen2.5-32b",
    "r1-distill-qwen-7b": "qwen2.5-7b",
}
FORWARD_FLOPS = 2
"""FLOPs per weight and token of a forward pass: a multiplication and an addition."""
TRAIN_FLOPS = 8
"""FLOPs per weight and token of a train step: forward 2, backward 4, and 2 for activations that are computed again."""


class Gpu(NamedTuple):
    """Public figures of one device."""

    name: str
    memory_bytes: float
    bytes_per_second: float
    """Peak bandwidth of the device's memory."""
    flops_per_second: float
    """Peak dense bf16 rate of the matrix units."""


GPUS: Mapping[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("A100", 80e9, 2.039e12, 312e12),  # SXM, 80 GB
        Gpu("H100", 80e9, 3.35e12, 989.4e12),  # SXM
        Gpu("H200", 141e9, 4.8e12, 989.4e12),  # SXM
        Gpu("B200", 180e9, 8.0e12, 2250e12),  # one of the eight of an HGX board
        Gpu("H800", 80e9, 3.35e12, 989.4e12),  # H100 SXM with less NVLink and float64
        Gpu("H20", 96e9, 4.0e12, 148e12),  # SXM
        Gpu("L40S", 48e9, 0.864e12, 362e12),  # PCIe
        Gpu("MI300X", 192e9, 5.3e12, 1307.4e12),  # OAM
    )
}
"""GPUs by name, from memory of the vendors' published figures; no data sheet was read. NVIDIA prints the rates with
sparsity, twice these dense ones."""


def find_gpu(name: str) -> Gpu:
    """Return a GPU of the table. Raises ConfigError with the known names."""
    found = GPUS.get(name.upper())
    if found is None:
        raise ConfigError(f"gpu={name}: not in the table; known are {', '.join(GPUS)}")
    return found


def _config(
    family: str, hidden: int, layers: int, heads: int, kv_heads: int, mlp: int, vocab: int, *, tied: bool = False
) -> Mapping[str, Any]:
    """Return the fields of ``config.json`` that decide sizes; a head has 128 numbers in all models but the smallest."""
    return {
        "model_type": family,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": mlp,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "head_dim": 64 if hidden == 896 else 128,
        "max_position_embeddings": 32_768,
    }


MODELS: Mapping[str, Mapping[str, Any]] = {
    "qwen2.5-0.5b": _config("qwen2", 896, 24, 14, 2, 4864, 151_936, tied=True),
    "qwen2.5-1.5b": _config("qwen2", 1536, 28, 12, 2, 8960, 151_936, tied=True),
    "r1-distill-qwen-1.5b": _config("qwen2", 1536, 28, 12, 2, 8960, 151_936),
    "qwen2.5-7b": _config("qwen2", 3584, 28, 28, 4, 18_944, 152_064),
    "qwen2.5-14b": _config("qwen2", 5120, 48, 40, 8, 13_824, 152_064),
    "qwen2.5-32b": _config("qwen2", 5120, 64, 40, 8, 27_648, 152_064),
    "qwen3-4b": _config("qwen3", 2560, 36, 32, 8, 9728, 151_936, tied=True),
    "qwen3-8b": _config("qwen3", 4096, 36, 32, 8, 12_288, 151_936),
    "qwen3-14b": _config("qwen3", 5120, 40, 40, 8, 17_408, 151_936),
    "qwen3-32b": _config("qwen3", 5120, 64, 64, 8, 25_600, 151_936),
}
"""Configurations by name, from memory of the models' config.json; a folder given as --model is read instead.

R1-Distill-Qwen-7B has the shape of Qwen2.5-7B.
"""


def find_model(name: str) -> Architecture:
    """Return a model of the table, or that of a Hugging Face folder. Raises ConfigError with the known names."""
    known = name.lower()
    config = MODELS.get(ALIASES.get(known, known))
    if config is not None:
        return architecture_from_config(config)
    if (Path(name) / "config.json").is_file():
        return read_architecture(Path(name))
    raise ConfigError(
        f"model={name}: neither a folder with config.json nor in the table; known are {', '.join((*MODELS, *ALIASES))}"
    )


def weight_count(model: Architecture) -> int:
    """Return the number of weights."""
    hidden, heads, kv_heads, head = model.hidden_size, model.head_count, model.kv_head_count, model.head_size
    attention = 2 * hidden * heads * head + 2 * hidden * kv_heads * head
    biases = (heads + 2 * kv_heads) * head * model.qkv_bias + hidden * model.output_bias
    norms = 2 * hidden + 2 * head * model.qk_norm
    layer = attention + biases + norms + 3 * hidden * model.mlp_size
    embeddings = model.vocab_size * hidden * (1 if model.tied_head else 2)
    return embeddings + model.layer_count * layer + hidden


def multiplied_weight_count(model: Architecture) -> int:
    """Return the number of weights that every token is multiplied with: all but an input embedding of its own."""
    return weight_count(model) - (0 if model.tied_head else model.vocab_size * model.hidden_size)


def kv_bytes_per_token(model: Architecture, tensor_parallel: int = 1) -> int:
    """Return the cache bytes of one token on each device; a key-value head is never split between devices."""
    kv_heads = -(-model.kv_head_count // tensor_parallel)
    return 2 * model.layer_count * kv_heads * model.head_size * WEIGHT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiencies:
    """Assumed constants, stated once for every prediction."""

    memory: float = 0.7
    """Reached share of a GPU's memory bandwidth."""
    compute: float = 0.4
    """Reached share of a GPU's dense bf16 rate, in prefills, large decode steps and training."""
    step_seconds: float = 0.003
    """Engine time per decode step that no GPU shortens: scheduling, launches, sampling."""
    cache_share: float = 0.9
    """Share of a GPU's memory for weights and cache of an engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """One generator: a model on ``tensor_parallel`` devices. Raises ConfigError for a model that does not fit."""

    gpu: Gpu
    model: Architecture
    tensor_parallel: int = 1
    efficiencies: Efficiencies = Efficiencies()

    def __post_init__(self) -> None:
        if self.model.head_count % self.tensor_parallel:
            raise ConfigError(
                f"tensor_parallel={self.tensor_parallel} does not divide the model's {self.model.head_count} attention "
                "heads"
            )
        if self._free_bytes <= 0:
            gigabytes = weight_count(self.model) * WEIGHT_BYTES / 1e9
            raise ConfigError(
                f"gpu={self.gpu.name}, tensor_parallel={self.tensor_parallel}: weights of {gigabytes:.1f} GB do not "
                f"fit {self.efficiencies.cache_share:g} of {self.tensor_parallel} x {self.gpu.memory_bytes / 1e9:g} "
                "GB; use more devices per generator, a larger GPU or a smaller model"
            )

    def costs(self, slots: int) -> EngineCosts:
        """Return the costs of up to ``slots`` running calls."""
        weights = multiplied_weight_count(self.model) / self.tensor_parallel
        read = WEIGHT_BYTES * weights / self._bytes_per_second
        compute = FORWARD_FLOPS * weights / self._flops_per_second
        slope = kv_bytes_per_token(self.model, self.tensor_parallel) / self._bytes_per_second
        base = (self.efficiencies.step_seconds + max(read, compute * running) for running in range(slots + 1))
        return EngineCosts(base=tuple(base), slope=(slope,) * (slots + 1), prefill_seconds_per_token=compute)

    def cache_tokens(self, longest_call: int) -> int:
        """Return the tokens of the cache. Raises ConfigError if it does not hold a call of ``longest_call`` tokens."""
        tokens = int(self._free_bytes / kv_bytes_per_token(self.model, self.tensor_parallel))
        if tokens < longest_call:
            raise ConfigError(
                f"gpu={self.gpu.name}, tensor_parallel={self.tensor_parallel}: beside the weights there is cache for "
                f"{tokens} tokens, but a call may have {longest_call}; use more devices per generator, a larger GPU or "
                "shorter lengths"
            )
        return tokens

    def train_seconds_per_token(self, devices: int) -> float:
        """Return the seconds of a train step per token on ``devices`` GPUs together."""
        return TRAIN_FLOPS * self.forward_seconds_per_token(devices) / FORWARD_FLOPS

    def forward_seconds_per_token(self, devices: int) -> float:
        """Return the seconds per token of a pass that only computes log-probabilities."""
        return FORWARD_FLOPS * multiplied_weight_count(self.model) / (devices * self._flops_per_second)

    @property
    def _bytes_per_second(self) -> float:
        return self.efficiencies.memory * self.gpu.bytes_per_second

    @property
    def _flops_per_second(self) -> float:
        return self.efficiencies.compute * self.gpu.flops_per_second

    @property
    def _free_bytes(self) -> float:
        weights = WEIGHT_BYTES * weight_count(self.model) / self.tensor_parallel
        return self.efficiencies.cache_share * self.gpu.memory_bytes - weights
