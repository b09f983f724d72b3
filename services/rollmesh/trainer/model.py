"""The policy as the trainer sees it: any Hugging Face causal LM, packed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from rollmesh.checkpoints.reasons import Reason
from rollmesh.errors import CheckpointError, ConfigError
from rollmesh.trainer.attention import PACKED_ATTENTION, PackedLayout, register_packed_attention
from rollmesh.trainer.forward import score_logits, score_tokens
from rollmesh.trainer.packing import MicroBatch

_REPLACED_FILES = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*.bin",
    "*.bin.index.json",
    "*.pt",
    "*.pth",
    "*.gguf",
    "config.json",
    "manifest.json",
)
_PROBE_TOKENS = (7, 5)
_PROBE_TOLERANCE = 1e-3


class PolicyModel(nn.Module):
    """A causal LM whose forward pass returns log-probabilities of chosen tokens of a packed row.

    The head runs inside ``forward`` (not after it), so that sharding hooks of the root module cover it.
    """

    def __init__(self, causal_lm: PreTrainedModel, *, linear_head: bool) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.linear_head = linear_head
        """Whether the logits are the head of the hidden states; otherwise the model's own forward makes them."""

    @property
    def config(self) -> PretrainedConfig:
        """Architecture of the model."""
        return self.causal_lm.config

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        layout: PackedLayout,
        rows: Tensor,
        targets: Tensor,
        temperatures: Tensor | None,
        entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of ``targets``, predicted by the tokens at ``rows``; see ``MicroBatch``."""
        inputs = {"input_ids": input_ids, "position_ids": position_ids, "use_cache": False, "layout": layout}
        if not self.linear_head:
            logits = self.causal_lm(**inputs, logits_to_keep=rows).logits[0]
            return score_logits(logits, targets, temperatures, entropy=entropy)
        hidden = self.causal_lm.base_model(**inputs).last_hidden_state[0]
        head = _output_head(self.causal_lm)
        assert head is not None, "linear_head says there is one"
        size = int(self.config.vocab_size)
        return score_tokens(hidden[rows], head, targets, temperatures, size, entropy=entropy)

    def score(self, micro: MicroBatch, *, entropy: bool) -> tuple[Tensor, Tensor]:
        """``forward`` on a micro-batch: (logprobs [scored], entropy [scored])."""
        scores: tuple[Tensor, Tensor] = self(
            micro.input_ids,
            micro.position_ids,
            micro.layout,
            micro.rows,
            micro.targets,
            micro.temperatures,
            entropy,
        )
        return scores


def load_policy_model(
    folder: Path, *, dtype: torch.dtype, device: torch.device, gradient_checkpointing: bool = False
) -> PolicyModel:
    """Load a Hugging Face folder (safetensors only) for training and check that packing does not change it.

    Raises CheckpointError when the folder cannot be read or its weights are of another architecture than its config,
    ConfigError when the architecture mixes packed sequences (no transformers attention interface, state that crosses
    sequences) or routes tokens to experts.
    """
    register_packed_attention()
    disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        _refuse_experts(config)
        _without_dropout(config)
        # Sizes that do not fit are taken in here and refused by name below, instead of by a table on the terminal.
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=PACKED_ATTENTION,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError, StrictDataclassError) as error:
        if isinstance(error, ConfigError):
            raise
        raise CheckpointError(f"{folder}: not a loadable causal LM: {error}") from error
    causal_lm: PreTrainedModel = loaded[0]
    _refuse_other_weights(folder, loaded[1])
    nn.Module.to(causal_lm, device)
    model = PolicyModel(causal_lm, linear_head=check_packing(causal_lm))
    if gradient_checkpointing:
        _enable_checkpointing(causal_lm)
    return model


def _refuse_other_weights(folder: Path, info: Mapping[str, Any]) -> None:
    """Weights that are missing would train from noise, and weights that are left over would be lost in silence."""
    found = {
        "without": sorted(info["missing_keys"]),
        "with an unknown": sorted(info["unexpected_keys"]),
        "with another shape of": sorted(str(key[0]) for key in info["mismatched_keys"]),
    }
    wrong = [f"{what} {keys[0]} ({len(keys)} in all)" for what, keys in found.items() if keys]
    if wrong:
        raise CheckpointError(
            f"{folder}: the weights are of another architecture than config.json: {'; '.join(wrong)}",
            reason=Reason.FOREIGN_ARCHITECTURE,
        )


@torch.no_grad()
def check_packing(causal_lm: PreTrainedModel) -> bool:
    """Put the model in train mode and compare two packed sequences with the same two alone in eval mode.

    Returns whether the head is a plain linear layer. Raises ConfigError when they differ.
    """
    device = next(causal_lm.parameters()).device
    vocab = int(causal_lm.config.vocab_size)
    ids = [torch.arange(3, 3 + n, device=device) * 7 % vocab for n in _PROBE_TOKENS]
    nn.Module.eval(causal_lm)
    alone = torch.cat([causal_lm(input_ids=x[None], use_cache=False).logits[0] for x in ids])
    layout = PackedLayout.of(_PROBE_TOKENS, device)
    positions = torch.cat([torch.arange(n, device=device) for n in _PROBE_TOKENS])[None]
    inputs = {"input_ids": torch.cat(ids)[None], "position_ids": positions, "use_cache": False, "layout": layout}
    name = type(causal_lm).__name__
    causal_lm.train()
    try:
        packed = causal_lm(**inputs).logits[0]
    except TypeError as error:
        raise ConfigError(f"model.path: {name} cannot be packed: {error}") from error
    tolerance = _PROBE_TOLERANCE if causal_lm.dtype in (torch.float32, torch.float64) else 3e-2
    scale = alone.abs().max()
    if (packed - alone).abs().max() > tolerance * scale:
        raise ConfigError(
            f"model.path: {name} cannot be packed: a sequence sees its neighbour or noise (it does not use "
            "transformers' attention interface, carries state across positions, or keeps a dropout)"
        )
    head = _output_head(causal_lm)
    if head is None or causal_lm.base_model is causal_lm:
        return False
    hidden = causal_lm.base_model(**inputs).last_hidden_state[0]
    return bool((head(hidden) - packed).abs().max() <= tolerance * scale)


def write_policy_folder(folder: Path, weights: dict[str, Tensor], dtype: torch.dtype, source: Path) -> None:
    """Write a folder that ``from_pretrained`` loads: weights in ``dtype``, everything else as ``source`` has it.

    ``weights`` are whole CPU tensors by their Hugging Face names, tied ones once.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.is_file() and not any(path.match(pattern) for pattern in _REPLACED_FILES):
            shutil.copyfile(path, folder / path.name)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in weights.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _output_head(causal_lm: Any) -> nn.Module | None:
    head: nn.Module | None = causal_lm.get_output_embeddings()
    return head


def _enable_checkpointing(causal_lm: Any) -> None:
    options = {"use_reentrant": False}
    if hasattr(causal_lm, "activation_checkpointing_enable"):
        causal_lm.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:  # its name before transformers 5.20
        causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def _refuse_experts(config: PretrainedConfig) -> None:
    for field in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"):
        experts = getattr(config, field, None)
        if isinstance(experts, int) and experts > 1:
            raise ConfigError(
                f"model.path: {config.model_type} routes tokens to {experts} experts ({field}); ratio losses need the "
                "sampler's routing replayed, which is not supported"
            )


def _without_dropout(config: PretrainedConfig) -> None:
    """On-policy ratios must be 1: the trainer's forward pass has to be the sampler's, in train mode too."""
    for field, value in config.to_dict().items():
        if "drop" in field and isinstance(value, float):
            setattr(config, field, 0.0)
