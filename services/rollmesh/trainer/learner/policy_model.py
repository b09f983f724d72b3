"""The trainer's policy model: any Hugging Face causal LM, with packed input."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
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
from rollmesh.trainer.learner.packing import PACKED_ATTENTION, MicroBatch, PackedLayout
from rollmesh.trainer.learner.packing_check import Precision, check_packing, length_limit, output_head


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
        """True if the logits are the head applied to the hidden states; else the model's own forward computes them."""
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
    def base_only(self) -> Iterator[PolicyModel]:
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
    ) -> tuple[Tensor, Tensor]:
        """Compute log-probability and entropy of ``targets``, predicted at ``rows``; see ``MicroBatch``."""
        if self.limit is not None and (tokens := max(layout.lengths)) > self.limit.tokens:
            raise self.limit.error("sequence tokens", tokens)
        inputs = {"input_ids": input_ids, "position_ids": position_ids, "use_cache": False, "layout": layout}
        if not self.linear_head:
            logits = self.causal_lm(**inputs, logits_to_keep=rows).logits[0]
            return score_logits(logits, targets, temperatures, kept, entropy=entropy)
        hidden = self.causal_lm.base_model(**inputs).last_hidden_state[0]
        head = output_head(self.causal_lm)
        assert head is not None, "linear_head requires an output head"
        size = int(self.config.vocab_size)
        return score_tokens(hidden[rows], head, targets, temperatures, size, entropy=entropy, kept=kept)

    def score(self, micro: MicroBatch, *, entropy: bool) -> tuple[Tensor, Tensor]:
        """Run ``forward`` on a micro-batch: (logprobs [scored], entropy [scored])."""
        packed = (micro.input_ids, micro.position_ids, micro.layout)
        scored = (micro.rows, micro.targets, micro.temperatures, micro.kept)
        scores: tuple[Tensor, Tensor] = self(*packed, *scored, entropy)
        return scores


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


LOGIT_ELEMENTS = 1 << 24
"""Logits in memory at once. More are computed in chunks, and recomputed in the backward pass."""


def score_tokens(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    targets: Tensor,
    temperatures: Tensor | None,
    vocab_size: int,
    *,
    entropy: bool,
    kept: Tensor | None = None,
    limit: int = LOGIT_ELEMENTS,
) -> tuple[Tensor, Tensor]:
    """Compute ``log_softmax(z / T)`` of the target and the entropy of that distribution, in nats.

    ``hidden`` float [tokens, width], ``targets`` int64 [tokens], ``temperatures`` float [tokens] or None for T = 1.
    ``kept`` int64 [tokens, largest set], the ids over which each softmax is taken, -1 after the last one; the whole
    vocabulary for a row without any, and for None. Returns (logprobs [tokens], entropy [tokens]), float32 unless the
    logits are float64. The entropy has no gradient, and is 0 unless ``entropy`` is set.
    """
    if kept is not None and type(head) is nn.Linear and bool((kept[:, 0] >= 0).all()):
        head, targets, kept, vocab_size = _narrow_head(head, targets, kept)

    def score(
        hidden: Tensor, targets: Tensor, temperatures: Tensor | None, kept: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return score_logits(head(hidden), targets, temperatures, kept, entropy=entropy)

    rows = max(1, limit // vocab_size)
    if len(targets) <= rows:
        return score(hidden, targets, temperatures, kept)
    scores: list[tuple[Tensor, Tensor]] = []
    for start in range(0, len(targets), rows):
        part = slice(start, start + rows)
        chunk = (
            hidden[part],
            targets[part],
            None if temperatures is None else temperatures[part],
            None if kept is None else kept[part],
        )
        recompute = torch.is_grad_enabled()
        scores.append(checkpoint(score, *chunk, use_reentrant=False) if recompute else score(*chunk))
    return torch.cat([s[0] for s in scores]), torch.cat([s[1] for s in scores])


def _narrow_head(
    head: nn.Linear, targets: Tensor, kept: Tensor
) -> tuple[Callable[[Tensor], Tensor], Tensor, Tensor, int]:
    """Return the head over the ids that occur in a set, and the same targets, sets and size of vocabulary for it."""
    ids, places = torch.unique(kept.clamp(min=0), return_inverse=True)
    narrow = partial(F.linear, weight=head.weight[ids], bias=None if head.bias is None else head.bias[ids])
    return narrow, torch.searchsorted(ids, targets), places.masked_fill(kept < 0, -1), len(ids)


def score_logits(
    logits: Tensor, targets: Tensor, temperatures: Tensor | None, kept: Tensor | None, *, entropy: bool
) -> tuple[Tensor, Tensor]:
    """Compute the scores of ``score_tokens`` from logits [tokens, vocab]."""
    if kept is None:
        return _score_columns(logits, targets, temperatures, entropy)
    in_sets = logits.gather(-1, kept.clamp(min=0)).masked_fill(kept < 0, -torch.inf)
    places = (kept == targets[:, None]).byte().argmax(-1)
    truncated = kept[:, 0] >= 0
    scores, order = [], []
    for member, columns, target in ((truncated, in_sets, places), (~truncated, logits, targets)):
        tempered = None if temperatures is None else temperatures[member]
        scores.append(_score_columns(columns[member], target[member], tempered, entropy))
        order.append(member.nonzero()[:, 0])
    back = torch.cat(order).argsort()
    return torch.cat([s[0] for s in scores])[back], torch.cat([s[1] for s in scores])[back]


def _score_columns(
    logits: Tensor, targets: Tensor, temperatures: Tensor | None, entropy: bool
) -> tuple[Tensor, Tensor]:
    """Compute the scores of ``score_tokens`` over the columns of logits; ``targets`` are columns."""
    scaled = logits if logits.dtype == torch.float64 else logits.float()
    if temperatures is not None:
        scaled = scaled / temperatures[:, None].to(scaled.dtype)
    distribution = scaled.log_softmax(-1)
    logprobs = distribution.gather(-1, targets[:, None])[:, 0]
    if not entropy:
        return logprobs, torch.zeros_like(logprobs)
    with torch.no_grad():
        return logprobs, torch.special.entr(distribution.exp()).sum(-1)
