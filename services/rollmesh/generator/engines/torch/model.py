"""The forward pass of Qwen2, Qwen3 and Llama over packed weights: prefill, one decode step, scoring."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from rollmesh.generator.engines.torch.architecture import Architecture
from rollmesh.generator.engines.torch.matmul import ROW_QUANTUM, add_product, product
from rollmesh.generator.engines.torch.plan import StepPlan, TierPlan
from rollmesh.generator.engines.torch.rope import rotate_, rotation_table
from rollmesh.generator.engines.torch.weights import Layer, Weights

_LOGIT_ROWS = 1024
"""Positions scored at once: bounds the [positions, vocab] block."""


def unit_norm(x: Tensor, floor: Tensor) -> Tensor:
    """x / sqrt(sum(x^2) + floor^2) over the last dimension, in float32; ``floor`` = sqrt(size * eps).

    sqrt(size) times this, times the norm's weight, is the RMS norm; both factors live in the packed weights. Three
    kernels instead of the six of the textbook form, and hypot keeps eps exact.
    """
    wide = x.float()
    return (wide / torch.hypot(torch.linalg.vector_norm(wide, dim=-1, keepdim=True), floor)).to(x.dtype)


class Model:
    """Stateless besides weights; the caches belong to the caller. Not safe for concurrent use."""

    def __init__(self, arch: Architecture, weights: Weights, positions: int, device: torch.device) -> None:
        self.arch = arch
        self.weights = weights
        self.device = device
        self._rotations = rotation_table(arch.rope, arch.head_size, positions, device)
        self._floor = torch.tensor(math.sqrt(arch.hidden_size * arch.norm_eps), device=device)
        self._head_floor = torch.tensor(math.sqrt(arch.head_size * arch.norm_eps), device=device)
        self._zero = torch.zeros((), dtype=weights.embedding.dtype, device=device)
        self._scale = arch.head_size**-0.5

    def swap(self, weights: Weights) -> None:
        """Serve other weights of the same architecture from the next call on.

        On a GPU they are copied into the tensors in use: no second copy in its memory, and no address changes.
        """
        if self.device.type == "cpu":
            self.weights = weights
            return
        for old, new in zip(self.weights.tensors(), weights.tensors(), strict=True):
            old.copy_(new, non_blocking=True)

    def decode(self, tokens: Tensor, plan: StepPlan) -> Tensor:
        """Append one token to every row of the plan; returns its logits [rows, vocab] and advances the plan."""
        weights = self.weights
        x = weights.embedding.index_select(0, tokens)
        rotations = self._rotations.index_select(0, plan.positions).unsqueeze(1)
        for tier in plan.tiers:
            tier.mask.index_put_(tier.place, self._zero)
        for number, layer in enumerate(weights.layers):
            product(unit_norm(x, self._floor), layer.qkv, layer.qkv_bias, out=plan.qkv)
            self._norm_heads_(plan.heads, layer)
            if plan.pairs is not None:
                plan.pairs.mul_(rotations)
            else:
                rotate_(plan.heads, rotations)
            for tier in plan.tiers:
                self._attend(tier, number)
            x = self._finish_layer(x, plan.attended, layer)
        plan.counters.add_(1)
        return self._logits(x)

    def prefill(self, tokens: Tensor, store: Callable[[int, Tensor, Tensor], None]) -> None:
        """Compute keys and values of right-padded contexts, tokens int64 [batch, length].

        ``store(layer, keys, values)`` receives [batch, kv_heads, length, head_size] tensors; columns beyond a row's
        own length are garbage. The last layer stops there: nothing after its keys and values is needed.
        """
        self._forward(tokens, store, keys_only=True)

    def score(self, tokens: Tensor) -> Tensor:
        """log_softmax at T=1 of each token given the ones before it, float32 [batch, length - 1]."""
        x = self._forward(tokens, lambda _layer, _keys, _values: None, keys_only=False)
        batch, length = tokens.shape
        states = x.view(batch, length, -1)[:, :-1].flatten(0, 1)
        targets = tokens[:, 1:].flatten()
        parts = []
        for rows, wanted in zip(torch.split(states, _LOGIT_ROWS), torch.split(targets, _LOGIT_ROWS), strict=True):
            logprobs = torch.log_softmax(self._logits(rows).float(), dim=-1)
            parts.append(logprobs.gather(1, wanted.unsqueeze(1)).squeeze(1))
        return torch.cat(parts).view(batch, length - 1)

    def _forward(self, tokens: Tensor, store: Callable[[int, Tensor, Tensor], None], *, keys_only: bool) -> Tensor:
        arch, weights = self.arch, self.weights
        batch, length = tokens.shape
        group = arch.heads_per_kv
        count = batch * length
        padding = -count % ROW_QUANTUM
        x = weights.embedding.index_select(0, F.pad(tokens.flatten(), (0, padding)))
        rotations = F.pad(self._rotations[:length].repeat(batch, 1, 1), (0, 0, 0, 0, 0, padding)).unsqueeze(1)
        mixed = x.new_zeros((len(x), arch.head_count * arch.head_size))
        for number, layer in enumerate(weights.layers):
            qkv = product(unit_norm(x, self._floor), layer.qkv, layer.qkv_bias)
            qkv = qkv.view(len(x), arch.kv_head_count, group + 2, arch.head_size)
            self._norm_heads_(qkv[:, :, : group + 1], layer)
            rotate_(qkv[:, :, : group + 1], rotations)
            heads = qkv[:count].view(batch, length, *qkv.shape[1:]).permute(0, 2, 3, 1, 4)
            keys, values = heads[:, :, group], heads[:, :, group + 1]  # heads [batch, kv, g + 2, length, d]
            store(number, keys, values)
            if keys_only and number == arch.layer_count - 1:
                break
            attended = F.scaled_dot_product_attention(
                heads[:, :, :group].flatten(1, 2),
                keys.repeat_interleave(group, dim=1) if group > 1 else keys,
                values.repeat_interleave(group, dim=1) if group > 1 else values,
                is_causal=True,
            )
            mixed[:count] = attended.transpose(1, 2).reshape(count, -1)
            x = self._finish_layer(x, mixed, layer)
        return x[:count]

    def _norm_heads_(self, heads: Tensor, layer: Layer) -> None:
        if layer.qk_norm is not None:  # heads [rows, kv, g + 1, d]
            heads.copy_(unit_norm(heads, self._head_floor).mul_(layer.qk_norm))

    def _attend(self, tier: TierPlan, number: int) -> None:
        tier.keys[number].index_put_(tier.place, tier.new_key)
        tier.values[number].index_put_(tier.place, tier.new_value)
        scores = torch.baddbmm(tier.span_mask, tier.query, tier.span_keys[number], alpha=self._scale)
        torch.bmm(torch.softmax(scores, dim=-1), tier.span_values[number], out=tier.attended)

    def _finish_layer(self, x: Tensor, attended: Tensor, layer: Layer) -> Tensor:
        x = add_product(x, attended, layer.output, layer.output_bias)
        gate, up = product(unit_norm(x, self._floor), layer.gate_up).chunk(2, dim=-1)
        return add_product(x, F.silu(gate).mul_(up), layer.down)

    def _logits(self, x: Tensor) -> Tensor:
        return product(unit_norm(x, self._floor).mul_(self.weights.norm), self.weights.head)
