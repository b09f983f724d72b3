"""The trainer's policy model: any Hugging Face causal LM, with packed input."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from rollmesh.checkpoints.describe import ADAPTER_CONFIG_FILE, reject_quantised
from rollmesh.config.model import AdapterConfig
from rollmesh.errors import CheckpointError, ConfigError, Reason
from rollmesh.trainer.learner.adapter_layers import (
    adapter_off,
    adapter_parameters,
    add_adapter,
    base_parameters,
    halve_base,
)
from rollmesh.trainer.learner.packed_attention import PACKED_ATTENTION, PackedLayout
from rollmesh.trainer.learner.packing import MicroBatch
from rollmesh.trainer.learner.packing_check import (
    Precision,
    base_model,
    check_packing,
    length_limit,
    output_head,
    own_logits,
)
from rollmesh.trainer.learner.token_scores import OwnLogits, TopTokens, score_tokens, score_top_tokens


class PolicyModel(nn.Module):
    """A causal LM that scores tokens of a packed row. ``forward`` runs the head too, for the hooks of its shards."""

    def __init__(self, causal_lm: PreTrainedModel, *, linear_head: bool) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.adapter: AdapterConfig | None = None
        """Adapter above the frozen weights, with its layers by name; None if all weights are trained."""
        self.adapter_file: Mapping[str, Any] = {}
        """Contents of the adapter's ``adapter_config.json``; empty without an adapter."""
        self.linear_head = linear_head
        """True if the logits are the head applied to the hidden states; else the model scales or caps them."""
        self.limit = length_limit(causal_lm.config)
        """Limit on the length of packed sequences; None if there is none."""

    @property
    def config(self) -> PretrainedConfig:
        """Hugging Face config of the model."""
        return self.causal_lm.config

    @property
    def has_dropout(self) -> bool:
        """True if the adapter drops inputs in passes with a gradient."""
        return self.adapter is not None and self.adapter.dropout > 0

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that training changes, by their names in a published folder; tied ones occur once."""
        return dict(self.causal_lm.named_parameters()) if self.adapter is None else adapter_parameters(self.causal_lm)

    def base_parameters(self) -> dict[str, nn.Parameter]:
        """Return the weights without the adapter, by their Hugging Face names; tied ones occur once."""
        return base_parameters(self.causal_lm)

    @contextmanager
    def base_only(self) -> "Iterator[PolicyModel]":
        """Switch the adapter off within the block. For passes without a gradient."""
        with adapter_off(self.causal_lm):
            yield self

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        layout: PackedLayout,
        rows: Tensor,
        targets: Tensor,
        temperatures: Tensor | None,
        kept: Tensor | None,
        entropy: bool,
        top: TopTokens | None,
    ) -> tuple[Tensor, ...]:
        """Compute log-probability and entropy of ``targets``, predicted at ``rows``; see ``MicroBatch``.

        With the ``top`` tokens of a teacher for each of them, their forward KL follows.
        """
        hidden = self._hidden(input_ids, position_ids, layout)[rows]
        head: Any = output_head(self.causal_lm)
        columns, own = (targets, temperatures, kept), self._own_logits
        return score_tokens(hidden, head.weight, head.bias, *columns, entropy=entropy, top=top, own_logits=own)

    def _hidden(self, input_ids: Tensor, position_ids: Tensor, layout: PackedLayout) -> Tensor:
        """Return the last hidden states of a packed row, [tokens, width]."""
        if self.limit is not None and (tokens := layout.longest) > self.limit.tokens:
            raise self.limit.error("sequence tokens", tokens)
        inputs = {"input_ids": input_ids, "position_ids": position_ids, "use_cache": False, "layout": layout}
        hidden: Tensor = base_model(self.causal_lm)(**inputs).last_hidden_state[0]
        return hidden

    @property
    def _own_logits(self) -> OwnLogits | None:
        return None if self.linear_head else partial(own_logits, self.causal_lm)

    def score(self, micro: MicroBatch, *, entropy: bool, top: TopTokens | None = None) -> tuple[Tensor, ...]:
        """Run ``forward`` on a micro-batch: (logprobs [scored], entropy [scored]), with ``top`` the forward KL too."""
        packed = (micro.input_ids, micro.position_ids, micro.layout)
        scored = (micro.rows, micro.targets, micro.temperatures, micro.kept)
        scores: tuple[Tensor, ...] = self(*packed, *scored, entropy, top)
        return scores

    @torch.no_grad()
    def score_top(self, micro: MicroBatch, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
        """Score a micro-batch of a model in one process: see ``score_top_tokens``."""
        hidden = self._hidden(micro.input_ids, micro.position_ids, micro.layout)[micro.rows]
        head: Any = output_head(self.causal_lm)
        columns = (micro.targets, micro.temperatures, top_k)
        return score_top_tokens(hidden, head.weight, head.bias, *columns, own_logits=self._own_logits)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Source of a policy model: a folder of full weights, and the adapter above them if there is one."""

    folder: Path
    adapter: AdapterConfig | None = None
    base_dtype: torch.dtype | None = None
    """Dtype of the published base: the frozen weights are rounded to it, so that engines apply the adapter to the same
    weights."""
    half_base: bool = False
    """Keep the frozen weights in bfloat16 (``halve_base``)."""

    def load(
        self,
        *,
        dtype: torch.dtype,
        device: torch.device,
        gradient_checkpointing: bool = False,
        longest: int = 0,
        precision: Precision = nullcontext,
    ) -> PolicyModel:
        """Load the folder (``load_policy_model``) and add a zero adapter. CheckpointError for weights not finite."""
        model = load_policy_model(self.folder, dtype=dtype, device=device, longest=longest, precision=precision)
        if wrong := [name for name, weight in model.named_parameters() if not torch.isfinite(weight).all()]:
            raise CheckpointError(
                f"{self.folder}: {wrong[0].removeprefix('causal_lm.')} has values that are not finite ({len(wrong)} "
                "tensor(s) in total): the weights are damaged, or of a run that diverged; use another checkpoint",
                reason=Reason.MISMATCH,
            )
        if self.adapter is not None:
            for parameter in model.parameters():
                parameter.data.copy_(parameter.data.to(self.base_dtype or parameter.dtype))
            model.adapter_file = add_adapter(model.causal_lm, self.adapter)
            if self.half_base:
                halve_base(model.causal_lm)
            model.adapter = self.adapter.model_copy(update={"target": tuple(model.adapter_file["target_modules"])})
        if gradient_checkpointing:
            causal_lm: Any = model.causal_lm
            options = {"use_reentrant": False}
            if hasattr(causal_lm, "activation_checkpointing_enable"):
                causal_lm.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
            else:  # the name before transformers 5.20
                causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        return model


_LOADING = threading.Lock()
"""transformers patches torch while it loads: of two loads in one process (a trainer and a teacher, ``--inline``) one
does not tie its head."""


def load_policy_model(
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    longest: int = 0,
    precision: Precision = nullcontext,
) -> PolicyModel:
    """Load a Hugging Face folder (safetensors only) for training and check that packing does not change its results.

    The check covers sequences of up to ``longest`` tokens, in ``precision``. Raises CheckpointError if the folder
    cannot be read or its weights do not match the architecture of its config. Raises ConfigError if the architecture
    mixes packed sequences (no transformers attention interface, state that crosses sequences, RoPE that depends on the
    length), is not causal, or routes tokens to experts.
    """
    if (folder / ADAPTER_CONFIG_FILE).is_file():  # transformers would load it above a base of its own choice
        raise CheckpointError(
            f"{folder}: contains an adapter ({ADAPTER_CONFIG_FILE}) where full weights are expected; "
            "merge it into its base with peft's merge_and_unload, and name the merged folder"
        )
    disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        reject_quantised(config.to_dict(), "model.path")
        _reject_experts(config)
        if (limit := length_limit(config)) is not None and longest > limit.tokens:
            raise limit.error("generator.max_context_tokens", longest)
        for field, value in config.to_dict().items():
            # On-policy ratios are 1 only if train mode computes the same as the sampler.
            if "drop" in field and isinstance(value, float):
                setattr(config, field, 0.0)
        # Mismatched sizes are accepted here and rejected by name below; transformers would print a table.
        with _LOADING:
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
        if isinstance(error, ConfigError | CheckpointError):
            raise
        if error.args == (PACKED_ATTENTION,):
            raise ConfigError(
                f"model.path: {config.model_type} cannot be packed: it does not use transformers' attention interface"
            ) from error
        raise CheckpointError(f"{folder}: not a loadable causal LM: {error}") from error
    causal_lm: PreTrainedModel = loaded[0]
    _reject_other_weights(folder, loaded[1])
    head = output_head(causal_lm)
    if head is not None:  # what is in memory: transformers unties a head of its own, whatever config says
        causal_lm.config.tie_word_embeddings = head.weight is causal_lm.get_input_embeddings().weight
    nn.Module.to(causal_lm, device)
    return PolicyModel(causal_lm, linear_head=check_packing(causal_lm, longest=longest, precision=precision))


def _reject_other_weights(folder: Path, info: Mapping[str, Any]) -> None:
    """Raise CheckpointError for missing weights, which would start from noise, and unexpected or mismatched ones."""
    found = {
        "without": sorted(info["missing_keys"]),
        "with an unknown": sorted(info["unexpected_keys"]),
        "with another shape of": sorted(str(key[0]) for key in info["mismatched_keys"]),
    }
    wrong = [f"{problem} {keys[0]} ({len(keys)} in total)" for problem, keys in found.items() if keys]
    if wrong:
        raise CheckpointError(
            f"{folder}: the weights do not match the architecture in config.json: {'; '.join(wrong)}",
            reason=Reason.FOREIGN_ARCHITECTURE,
        )


def _reject_experts(config: PretrainedConfig) -> None:
    for field in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"):
        experts = getattr(config, field, None)
        if isinstance(experts, int) and experts > 1:
            raise ConfigError(
                f"model.path: {config.model_type} routes tokens to {experts} experts ({field}); ratio losses need the "
                "sampler's routing replayed, which is not supported"
            )
