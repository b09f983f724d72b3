"""Log-probability and entropy of tokens from the hidden states that predict them, one chunk of logits at a time."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_LOGITS = 1 << 24
"""Logits in memory at once, 64 MiB in float32. The backward pass computes them again, chunk by chunk."""

OwnLogits = Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]
"""Function from hidden states [tokens, width] and the linear layer of the head to logits [tokens, vocab], for a model
that scales or caps them."""


def score_tokens(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperatures: Tensor | None,
    kept: Tensor | None = None,
    *,
    entropy: bool,
    top: "TopTokens | None" = None,
    own_logits: OwnLogits | None = None,
    chunk_logits: int = CHUNK_LOGITS,
) -> tuple[Tensor, ...]:
    """Compute ``log_softmax(z / T)`` of the target and the entropy of that distribution, in nats.

    ``hidden`` float [tokens, width], ``weight`` [vocab, width] and ``bias`` [vocab] of the head, ``targets`` int64
    [tokens], ``temperatures`` float [tokens] or None for T = 1. ``kept`` int64 [2, ids] has sorted pairs of a row and
    an id over which its softmax is taken; the whole vocabulary for a row without any, and for None. Returns (logprobs
    [tokens], entropy [tokens]), float32 unless the weights are float64. The entropy has no gradient, and is 0 unless
    ``entropy`` is set. With the ``top`` tokens of a teacher, and then without kept sets, the forward KL [tokens]
    follows: ``sum_i p_i log(p_i / q_i)`` over these tokens i and all others together (docs/methods.md: Teachers).
    """
    if kept is not None and own_logits is None and len(torch.unique_consecutive(kept[0])) == len(hidden):
        # Only the part of the head that occurs in a set is computed.
        ids, places = torch.unique(kept[1], return_inverse=True)
        weight, bias = weight[ids], None if bias is None else bias[ids]
        targets, kept = torch.searchsorted(ids, targets), torch.stack((kept[0], places))
    columns = _Columns(targets=targets, temperatures=temperatures, kept=kept, top=top)
    options = _Options(entropy=entropy, own_logits=own_logits, chunk_logits=chunk_logits)
    scores: tuple[Tensor, ...] = _Scores.apply(hidden, weight, bias, columns, options)  # type: ignore[no-untyped-call]
    return scores[:2] if top is None else scores


@torch.no_grad()
def score_top_tokens(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperatures: Tensor | None,
    top_k: int,
    *,
    own_logits: OwnLogits | None = None,
    chunk_logits: int = CHUNK_LOGITS,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``log_softmax(z / T)`` of the target and of the ``top_k`` most likely tokens, without a gradient.

    Arguments as of ``score_tokens``. Returns (logprobs [tokens], top ids int64 [tokens, top_k], their logprobs
    [tokens, top_k]), the most likely token first.
    """
    options = _Options(entropy=False, own_logits=own_logits, chunk_logits=chunk_logits)
    head, columns = (
        _Head(weight, bias, weight.dtype, options, len(hidden)),
        _Columns(targets=targets, temperatures=temperatures, kept=None),
    )
    logprobs = hidden.new_empty(len(hidden), dtype=_full(weight.dtype))
    top_logprobs = logprobs.new_empty((len(hidden), top_k))
    top_ids = targets.new_empty((len(hidden), top_k))
    for part in head.parts:
        scaled = columns[part].restrict_(head.logits(hidden[part]))
        torch.log_softmax(scaled, -1, out=scaled)
        logprobs[part] = scaled.gather(-1, columns.targets[part, None])[:, 0]
        if top_k:
            top_logprobs[part], top_ids[part] = scaled.topk(top_k)
    return logprobs, top_ids, top_logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class TopTokens:
    """Most likely tokens of a teacher, p; all other tokens together are one outcome."""

    ids: Tensor  # int64 [tokens, k]
    logprobs: Tensor  # float [tokens, k]

    def __getitem__(self, part: slice) -> "TopTokens":
        return TopTokens(ids=self.ids[part], logprobs=self.logprobs[part])

    def forward_kl(self, logprobs: Tensor) -> Tensor:
        """Return KL(p || q) of the log-probabilities of q, [tokens, vocab], which are as before on return; [tokens]."""
        own, rest = logprobs.gather(-1, self.ids), self._rest(logprobs)
        others = logprobs.scatter_(-1, self.ids, -torch.inf).logsumexp(-1, keepdim=True)
        logprobs.scatter_(-1, self.ids, own)
        kl = (self.logprobs.exp() * (self.logprobs - own)).sum(-1, keepdim=True)
        kl += torch.special.xlogy(rest, rest) - torch.where(rest > 0, rest * others, 0.0)
        return kl[:, 0]

    def overwrite(self, logits: Tensor, targets: Tensor, given: Tensor, of_kl: Tensor) -> Tensor:
        """Overwrite logits [tokens, vocab] with their gradient, from those of log-probability and KL, [tokens, 1]."""
        own, rest = logits.gather(-1, self.ids), self._rest(logits)
        others = logits.scatter_(-1, self.ids, -torch.inf).logsumexp(-1, keepdim=True)
        whole = torch.logaddexp(others, own.logsumexp(-1, keepdim=True))
        if self.ids.shape[1] < logits.shape[1]:
            # Shares of the sum of the others: the teacher's part of the gradient stays where that sum underflows.
            torch.softmax(logits, -1, out=logits)
            logits.mul_((of_kl - given) * (others - whole).exp() - of_kl * rest)
        logits.scatter_(-1, self.ids, (of_kl - given) * (own - whole).exp() - of_kl * self.logprobs.exp())
        return logits.scatter_add_(-1, targets[:, None], given)

    def _rest(self, logits: Tensor) -> Tensor:
        """Return the probability p of all other tokens, [tokens, 1]; 0 if there are none."""
        rest = (1 - self.logprobs.exp().sum(-1, keepdim=True)).clamp(min=0)
        return rest if self.ids.shape[1] < logits.shape[1] else torch.zeros_like(rest)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    entropy: bool
    own_logits: OwnLogits | None
    chunk_logits: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Columns:
    """Columns that the tokens are scored by; see ``score_tokens``."""

    targets: Tensor
    temperatures: Tensor | None
    kept: Tensor | None
    top: TopTokens | None = None

    def __getitem__(self, part: slice) -> "_Columns":
        heat, kept = self.temperatures, self.kept
        if kept is not None:
            first, last = torch.searchsorted(kept[0], kept.new_tensor([part.start, part.stop])).tolist()
            kept = kept[:, first:last] - kept.new_tensor([[part.start], [0]])
        return _Columns(
            targets=self.targets[part],
            temperatures=None if heat is None else heat[part],
            kept=kept,
            top=None if self.top is None else self.top[part],
        )

    def scale_(self, values: Tensor) -> Tensor:
        """Divide values, [tokens, any], by the temperatures in place."""
        return values if self.temperatures is None else values.div_(self.temperatures[:, None])

    def restrict_(self, logits: Tensor) -> Tensor:
        """Divide logits by the temperatures, and set those outside of the kept sets to minus infinity, in place."""
        logits = self.scale_(logits)
        if self.kept is None:
            return logits
        rows, ids = self.kept
        inside = logits[rows, ids]
        return logits.index_fill_(0, torch.unique_consecutive(rows), -torch.inf).index_put_((rows, ids), inside)


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, columns: _Columns, options: _Options
    ) -> tuple[Tensor, Tensor, Tensor]:
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        ctx.save_for_backward(hidden, weight, bias)
        ctx.rest = columns, options, dtype
        # Not two rows of one tensor: FSDP2 warns of views in each pass without a gradient.
        logprobs, entropy, forward_kl = (hidden.new_zeros(len(hidden), dtype=_full(dtype)) for _ in range(3))
        with torch.autocast(kind, enabled=False):
            head = _Head(weight, bias, dtype, options, len(hidden))
            for part in head.parts:
                scaled = columns[part].restrict_(head.logits(hidden[part]))
                torch.log_softmax(scaled, -1, out=scaled)
                logprobs[part] = scaled.gather(-1, columns.targets[part, None])[:, 0]
                if columns.top is not None:
                    forward_kl[part] = columns.top[part].forward_kl(scaled)
                if options.entropy:
                    entropy[part] = torch.special.entr(scaled.exp_(), out=scaled).sum(-1)
                del scaled  # before the next chunk is there
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy, forward_kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Tensor, of_kl: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        columns: _Columns
        columns, options, dtype = ctx.rest
        head = _Head(weight, bias, dtype, options, len(hidden))
        of_hidden = torch.empty_like(hidden)
        of_weight = torch.zeros_like(weight, dtype=_full(weight.dtype)) if ctx.needs_input_grad[1] else None
        of_bias = torch.zeros_like(bias, dtype=_full(bias.dtype)) if ctx.needs_input_grad[2] else None

        def of_logits(logits: Tensor) -> Tensor:
            """Overwrite the logits of the part with their gradient."""
            given = columns[part].scale_(gradient[part, None].clone())
            scaled = columns[part].restrict_(logits)
            if columns.top is not None:
                also = columns[part].scale_(of_kl[part, None].clone())
                return columns.top[part].overwrite(scaled, columns.targets[part], given, also)
            torch.softmax(scaled, -1, out=scaled)
            scaled.mul_(-given).scatter_add_(-1, columns.targets[part, None], given)
            return scaled

        for part in head.parts:
            of_hidden[part], inputs, outputs = head.gradients(hidden[part], of_logits)
            if of_weight is not None:
                _add_product(of_weight, outputs.T, inputs)
            if of_bias is not None:
                of_bias += outputs.sum(0)
            del inputs, outputs
        of_head = (None if g is None else g.to(t.dtype) for g, t in ((of_weight, weight), (of_bias, bias)))
        return of_hidden, *of_head, None, None


class _Head:
    """The head's linear layer, within the model's own code if it has some. All chunks share the memory of one."""

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, options: _Options, tokens: int) -> None:
        self._weight = weight.detach().to(dtype)
        self._bias = None if bias is None else bias.detach().to(dtype)
        self._own = options.own_logits
        rows = max(1, options.chunk_logits // len(weight))
        self.parts = [slice(start, start + rows) for start in range(0, tokens, rows)]
        """Tokens of each chunk."""
        self._memory = self._weight.new_empty((min(rows, tokens), len(weight)))

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits, to overwrite, [tokens, vocab]."""
        if self._own is None:
            return _float(self._linear(hidden))
        # What the code keeps for its gradient stays as it is.
        return _float(self._own(hidden, self._linear), copy=True)

    def gradients(self, hidden: Tensor, of_logits: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradient of hidden states, and the inputs of the layer with the gradient of its outputs."""
        if self._own is None:
            outputs = of_logits(self.logits(hidden)).to(self._weight.dtype)
            return outputs @ self._weight, hidden, outputs
        start = hidden.detach().requires_grad_()
        seen: list[tuple[Tensor, Tensor]] = []

        def linear(inputs: Tensor) -> Tensor:
            seen.append((inputs, self._linear(inputs.detach()).requires_grad_()))
            return seen[0][1]

        with torch.enable_grad():
            logits = self._own(start, linear)
        ((inputs, outputs),) = seen
        given = of_logits(_float(logits.detach(), copy=True)).to(logits.dtype)
        (given,) = torch.autograd.grad(logits, outputs, given)
        (of_hidden,) = torch.autograd.grad(inputs, start, (given @ self._weight).to(inputs.dtype))
        return of_hidden, inputs.detach().flatten(0, -2), given.flatten(0, -2)

    def _linear(self, inputs: Tensor) -> Tensor:
        flat = inputs.flatten(0, -2).to(self._weight.dtype)
        outputs, weight = self._memory[: len(flat)], self._weight.T
        if self._bias is None:
            torch.mm(flat, weight, out=outputs)
        else:
            torch.addmm(self._bias, flat, weight, out=outputs)
        return outputs.view(*inputs.shape[:-1], -1)


def _float(values: Tensor, *, copy: bool = False) -> Tensor:
    return values.to(_full(values.dtype), copy=copy)


def _full(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``left @ right``, in place where the dtypes are equal."""
    right = right.to(left.dtype)
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right
