"""Load-time check that packing does not change a model's results, at the lengths and precision of the run.

The weights of a new model are small, so a soft cap, an attention bias or a lost mask hardly changes its logits. The
logits of the current weights therefore cannot prove a property that depends on the size of the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from rollmesh.errors import ConfigError
from rollmesh.trainer.learner.packing import PACKED_ATTENTION, PackedLayout

Precision = Callable[[], AbstractContextManager[Any]]
"""Factory of the context manager of a forward pass."""

_SHORT = 7
_TOLERANCE, _HALF_TOLERANCE = 1e-3, 3e-2
_ROUNDING = 1e-5
"""Tolerated relative change in float32 when only a neighbouring sequence or a later token changes."""
_EAGER_TOKENS = 8192
"""Longest probe for eager attention; above it the attention scores need too much memory, and sdpa is the reference."""
_LARGE_HIDDEN = 1e5
"""Largest hidden value of the head test: its logits are far above any soft cap, so a capped head fails the test."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthLimit:
    """Number of tokens up to which all sequences share the same RoPE frequencies."""

    tokens: int
    rope_type: str

    def error(self, field: str, tokens: int) -> ConfigError:
        """Return the error for a sequence, or a setting, of ``tokens`` tokens."""
        return ConfigError(
            f"{field}={tokens}: rope_type={self.rope_type} of this model changes all its frequencies above "
            f"{self.tokens} tokens, so a logprob depends on the longest sequence of the micro-batch; set "
            f"generator.max_context_tokens to at most {self.tokens}, or use a model with another rope_type (yarn, "
            "linear, llama3)"
        )


def length_limit(config: PretrainedConfig) -> LengthLimit | None:
    """Return the limit of a model with dynamic or longrope RoPE; None for all other models."""
    text = config.get_text_config()
    found = getattr(text, "rope_parameters", None) or {}
    kinds = list(found.values()) if all(isinstance(kind, Mapping) for kind in found.values()) else [found]
    limits = []
    for kind in kinds:
        rope_type = str(kind.get("rope_type", "default"))
        if rope_type == "longrope":
            limits.append(LengthLimit(tokens=int(kind["original_max_position_embeddings"]), rope_type=rope_type))
        elif "dynamic" in rope_type:
            limits.append(LengthLimit(tokens=int(text.max_position_embeddings), rope_type=rope_type))
    return min(limits, key=lambda limit: limit.tokens, default=None)


@torch.no_grad()
def check_packing(causal_lm: PreTrainedModel, *, longest: int = 0, precision: Precision = nullcontext) -> bool:
    """Compare two packed sequences with each sequence alone in the model's own attention; set train mode.

    One sequence is longer than every attention window that sequences of ``longest`` tokens exceed. Returns True if the
    head is a plain linear layer. Raises ConfigError if the results differ, if a token depends on a later token or on
    the neighbouring sequence, and if the model drops its attention arguments.
    """
    device, name = next(causal_lm.parameters()).device, type(causal_lm).__name__
    vocab = int(causal_lm.config.vocab_size)
    # Just above the largest window or chunk that the run exceeds.
    sizes = causal_lm.config.get_text_config().to_dict().items()
    windows = [v for k, v in sizes if type(v) is int and ("window" in k or "chunk" in k) and 0 < v < longest]
    probe = max([_SHORT, *(window + 3 for window in windows)])
    ids = [torch.arange(3, 3 + n, device=device) * 7 % vocab for n in (probe, 5)]
    with precision():
        nn.Module.eval(causal_lm)
        own = "eager" if len(ids[0]) <= _EAGER_TOKENS else "sdpa"
        with _attention(causal_lm, own):
            alone = torch.cat([_hidden(causal_lm, {"input_ids": x[None]}) for x in ids])
        causal_lm.train()
        try:
            packed = _hidden(causal_lm, _packed(ids))
            changed = _hidden(causal_lm, _packed([torch.cat([ids[0][:-1], (ids[0][-1:] + 1) % vocab]), ids[1]]))
        except (TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"model.path: {name} cannot be packed: {error}") from error
        scale = alone.abs().max()
        moved = (changed - packed).abs().amax(-1) / scale
        moved[len(ids[0]) - 1] = 0  # the changed token itself
        tolerance, rounding = _tolerances(packed)
        if moved[: len(ids[0])].max() > rounding:
            raise ConfigError(
                f"model.path: {name} cannot be packed: a token depends on a later token (the model is not causal, has "
                "a dropout, or does not use transformers' attention interface)"
            )
        if moved.max() > rounding or (packed - alone).abs().max() > tolerance * scale:
            raise ConfigError(
                f"model.path: {name} cannot be packed: a sequence depends on its neighbour or on noise, or differs "
                "from the model's own attention (the model does not use transformers' attention interface, carries "
                "state across positions, has a dropout, or builds a mask that it does not pass on)"
            )
        return _head_is_linear(causal_lm, _packed(ids), packed[-1:])


def output_head(causal_lm: Any) -> nn.Module | None:
    """Return the layer from hidden states to logits, or None if the model does not expose it."""
    head: nn.Module | None = causal_lm.get_output_embeddings()
    return head


def _packed(ids: list[Tensor]) -> dict[str, Any]:
    lengths = [len(x) for x in ids]
    positions = torch.cat([torch.arange(n, device=ids[0].device) for n in lengths])[None]
    layout = PackedLayout.of(lengths, ids[0].device)
    return {"input_ids": torch.cat(ids)[None], "position_ids": positions, "layout": layout}


def _hidden(causal_lm: Any, inputs: dict[str, Any]) -> Tensor:
    """Return the input of the head, or the logits if the model has no separate base model."""
    if causal_lm.base_model is causal_lm:
        logits: Tensor = causal_lm(**inputs, use_cache=False).logits[0]
        return logits
    hidden: Tensor = causal_lm.base_model(**inputs, use_cache=False).last_hidden_state[0]
    return hidden


@contextmanager
def _attention(causal_lm: Any, name: str) -> Iterator[None]:
    causal_lm.set_attn_implementation(name)
    try:
        yield
    finally:
        causal_lm.set_attn_implementation(PACKED_ATTENTION)


def _tolerances(values: Tensor) -> tuple[float, float]:
    """Return the relative change that other kernels may make, and the one that other neighbours may make."""
    if values.dtype in (torch.bfloat16, torch.float16) or torch.is_autocast_enabled(values.device.type):
        return _HALF_TOLERANCE, _HALF_TOLERANCE
    return _TOLERANCE, _ROUNDING


def _head_is_linear(causal_lm: Any, inputs: dict[str, Any], last: Tensor) -> bool:
    """Tell whether large logits too are the head of the hidden states; ``last`` is the one of the last token."""
    head = output_head(causal_lm)
    if head is None or causal_lm.base_model is causal_lm:
        return False
    seen: list[tuple[Tensor, Tensor]] = []

    def enlarge(_: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
        (hidden,) = given
        large = hidden * (_LARGE_HIDDEN / hidden.abs().max().clamp(min=1e-9))
        seen.append((hidden[0, -1:], large[0, -1:]))
        return (large,)

    handle = head.register_forward_pre_hook(enlarge)
    try:
        logits = causal_lm(**inputs, use_cache=False, logits_to_keep=1).logits[0, -1:]
    finally:
        handle.remove()
    if len(seen) != 1:
        return False
    pairs = ((seen[0][0], last), (logits, head(seen[0][1])))
    return all(bool((got - want).abs().max() <= _tolerances(want)[0] * want.abs().max()) for got, want in pairs)
