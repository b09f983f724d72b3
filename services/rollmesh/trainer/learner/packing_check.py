"""Load-time check that packing does not change a model's results, at the lengths and precision of the run.

The weights of a new model are small, so a soft cap, an attention bias or a lost mask hardly changes its logits. The
logits of the current weights therefore cannot prove a property that depends on the size of the logits.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from rollmesh.errors import ConfigError
from rollmesh.trainer.learner.packed_attention import PACKED_ATTENTION
from rollmesh.trainer.learner.packing import pack_sequences

Precision = Callable[[], AbstractContextManager[Any]]
"""Factory of the context manager of a forward pass."""

_SHORT = 7
_TOLERANCE, _HALF_TOLERANCE = 1e-3, 3e-2
_ROUNDING = 1e-5
"""Tolerated relative change in float32 when only a neighbouring sequence or a later token changes."""
_SAME, _FORK = 1e-4, 40
"""Tolerated relative change in float32 when a beginning is shared, and the tokens of the shorter fork after it."""
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
    the neighbouring sequence, if the model drops its attention arguments, and if it has no head above a base model.
    """
    device, name = next(causal_lm.parameters()).device, type(causal_lm).__name__
    if output_head(causal_lm) is None or base_model(causal_lm) is None:
        raise ConfigError(f"model.path: {name} cannot be trained: it has no base model with a head above it")
    vocab = int(causal_lm.config.vocab_size)
    ids = [torch.arange(3, 3 + n, device=device) * 7 % vocab for n in (_probe_length(causal_lm.config, longest), 5)]
    with precision():
        nn.Module.eval(causal_lm)
        own = "eager" if len(ids[0]) <= _EAGER_TOKENS else "sdpa"
        with _attention(causal_lm, own):
            alone = torch.cat([_hidden(causal_lm, {"input_ids": x[None]}) for x in ids])
        causal_lm.train()
        try:
            packed = _hidden(causal_lm, _packed(ids)[0])
            changed = _hidden(causal_lm, _packed([torch.cat([ids[0][:-1], (ids[0][-1:] + 1) % vocab]), ids[1]])[0])
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
        return _head_is_linear(causal_lm, _packed(ids)[0], packed[-1:])


@torch.no_grad()
def shares_prefixes(causal_lm: PreTrainedModel, *, longest: int = 0, precision: Precision = nullcontext) -> bool:
    """Tell whether sequences have the results of their own when the tokens that they begin with are computed once.

    They have not in a model that takes the place of a token in the row for its position. ``longest`` and ``precision``
    are those of ``check_packing``; float32 shows what half precision hides.
    """
    device, vocab = next(causal_lm.parameters()).device, int(causal_lm.config.vocab_size)
    ids = torch.arange(3, 3 + _probe_length(causal_lm.config, longest), device=device) * 7 % vocab
    forks = [torch.cat([ids, (ids.new_tensor(range(n)) * 5 + n) % vocab]) for n in (_FORK, _FORK + 1)]
    for context in (nullcontext, precision):
        with context():
            alone = _hidden(causal_lm, _packed(forks)[0])
            inputs, rows = _packed(forks, 1)
            shared = _hidden(causal_lm, inputs)[rows]
            tolerance = _HALF_TOLERANCE if _is_half(alone) else _SAME
            if (shared - alone).abs().max() > tolerance * alone.abs().max():
                return False
    return True


def output_head(causal_lm: Any) -> nn.Module | None:
    """Return the layer from hidden states to logits, or None if the model does not expose it."""
    head: nn.Module | None = causal_lm.get_output_embeddings()
    return head


def base_model(causal_lm: Any) -> Any:
    """Return the model below the head, or None if there is none."""
    base = causal_lm.base_model  # itself, if it has no module of the name that its class gives
    return getattr(causal_lm, "model", None) if base is causal_lm else base


def _packed(ids: Sequence[Tensor], least_saved: int | None = None) -> tuple[dict[str, Any], Tensor]:
    """Return the input of the model, and the rows of all tokens in order."""
    scored = [np.append(x.cpu().numpy(), 0).astype(np.int32) for x in ids]  # the last token is no input
    micro = pack_sequences(scored, 1.0, ids[0].device, least_saved=least_saved)
    return {"input_ids": micro.input_ids, "position_ids": micro.position_ids, "layout": micro.layout}, micro.rows


def _probe_length(config: PretrainedConfig, longest: int) -> int:
    """Return a length just above the largest window or chunk that a run with sequences up to ``longest`` exceeds."""
    sizes = config.get_text_config().to_dict().items()
    windows = [v for k, v in sizes if type(v) is int and ("window" in k or "chunk" in k) and 0 < v < longest]
    return max([_SHORT, *(window + 3 for window in windows)])


def _hidden(causal_lm: Any, inputs: dict[str, Any]) -> Tensor:
    """Return the last hidden states, [tokens, width]."""
    hidden: Tensor = base_model(causal_lm)(**inputs, use_cache=False).last_hidden_state[0]
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
    return (_HALF_TOLERANCE, _HALF_TOLERANCE) if _is_half(values) else (_TOLERANCE, _ROUNDING)


def _is_half(values: Tensor) -> bool:
    """Tell whether values are computed in half precision."""
    return values.dtype in (torch.bfloat16, torch.float16) or torch.is_autocast_enabled(values.device.type)


class _Hidden(BaseModelOutputWithPast):
    """Output of a base model that has nothing but hidden states."""

    router_logits = cross_attentions = shared_kv_states = None


def own_logits(causal_lm: Any, hidden: Tensor, linear: Callable[[Tensor], Tensor]) -> Tensor:
    """Compute logits [tokens, vocab] by the model's own code, with ``linear`` in place of the layer of its head."""
    ids = torch.zeros((1, len(hidden)), dtype=torch.int64, device=hidden.device)
    given = _Hidden(last_hidden_state=hidden[None])
    with _replaced(base_model(causal_lm), lambda *_, **__: given), _replaced(output_head(causal_lm), linear):
        logits: Tensor = causal_lm(input_ids=ids, use_cache=False).logits[0]
    return logits


@contextmanager
def _replaced(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    module.forward = forward
    try:
        yield
    finally:
        del module.forward


def _head_is_linear(causal_lm: Any, inputs: dict[str, Any], last: Tensor) -> bool:
    """Tell whether large logits too are the head of the hidden states; ``last`` is that of the last token, [1, width].

    Raises ConfigError if they are not, and not the model's own code of the hidden states either.
    """
    head: Any = output_head(causal_lm)
    seen: list[tuple[Tensor, Tensor]] = []

    def enlarge(_: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
        large = given[0] * (_LARGE_HIDDEN / given[0].abs().max().clamp(min=1e-9))
        seen.append((given[0][0, -1:], large[0, -1:]))
        return (large,)

    def logits() -> Tensor:
        of_last: Tensor = causal_lm(**inputs, use_cache=False, logits_to_keep=1).logits[0, -1:]
        return of_last

    handle = head.register_forward_pre_hook(enlarge)
    try:
        large = logits()
    finally:
        handle.remove()
    if len(seen) == 1 and _equal(seen[0][0], last) and _equal(large, head(seen[0][1])):
        return True
    try:
        own = own_logits(causal_lm, last, head.forward)
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"model.path: {type(causal_lm).__name__} cannot be trained: {error}") from error
    if not _equal(own, logits()):
        raise ConfigError(
            f"model.path: {type(causal_lm).__name__} cannot be trained: its logits depend on more than the last hidden "
            "states of its base model"
        )
    return False


def _equal(got: Tensor, want: Tensor) -> bool:
    """Compare up to rounding. Values that are not finite are equal: the weights are checked elsewhere."""
    return got.shape == want.shape and not (got - want).abs().max() > _tolerances(want)[0] * want.abs().max()
