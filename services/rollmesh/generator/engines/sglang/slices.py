"""Request and response of one slice of a call. Pure functions.

A call is generated in requests of at most ``chunk_token_count`` tokens. Only a finished response reports the weights of
each token (``weight_versions``), so a slice is also the unit of delivery.
"""

import math
from base64 import b64decode
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rollmesh.errors import DataError, EngineError
from rollmesh.generator.engines.call_limits import empty_chunk
from rollmesh.kept_sets import slice_sets, stack_sets
from rollmesh.types import Chunk, FinishReason, Float32Array, Int32Array, KeptSets, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpan:
    """Tokens [start, end) of a slice, sampled from one policy version."""

    policy_version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Tokens of one response."""

    token_ids: Int32Array  # [tokens]
    logprobs: Float32Array  # [tokens], log_softmax(z/T) over the kept set, else the full vocabulary; raw at T=0
    spans: tuple[TokenSpan, ...]
    """Spans that cover the tokens in order without gaps."""
    stopped: bool
    """True if the last token is one of the call's stop tokens."""
    aborted: bool
    """True if an abort ended the slice before its budget."""
    cut: bool = False
    """True if tokens at its end were rejected."""
    prompt_token_count: int = 0
    cached_token_count: int = 0
    retraction_count: int = 0
    """Times that the server took the request out of its batch, for a pause or for lack of cache."""
    kept_sets: KeptSets | None = None
    verify_count: int = 0
    """Steps in which the server verified drafts; 0 from a server without them."""
    drafted_count: int = 0
    accepted_count: int = 0

    def __len__(self) -> int:
        return len(self.token_ids)


_DEFAULT_SAMPLING = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
"""Sampling parameters sent explicitly, because a server may have other defaults."""


def slice_body(
    context: Sequence[int],
    new_token_count: int,
    sampling: SamplingParams,
    *,
    request_id: str,
    cache_key: str,
    adapter: str | None = None,
) -> dict[str, Any]:
    """Build the /generate request that continues ``context``; token ids in and out, one log-probability a token.

    ``adapter`` is the server's name of an adapter; None is the base. The server returns kept sets only where top-k is
    on; one that is not in the call leaves a quarter of the largest set to tokens that are as likely as the last one:
    on GPUs the server keeps all of them, and logits in bfloat16 are often equal.
    """
    keeps = sampling.kept_tokens > 0
    most = sampling.kept_tokens - sampling.kept_tokens // 4 if keeps else -1
    return {
        **({} if adapter is None else {"lora_path": adapter}),
        **({"return_sampling_mask": True, "sampling_logprobs_mode": "selected"} if keeps else {}),
        "rid": request_id,
        "input_ids": context,
        "extra_key": cache_key,
        "return_logprob": True,
        "logprob_start_len": -1,
        "sampling_params": {
            "max_new_tokens": new_token_count,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or most,
            "min_p": sampling.min_p,
            **_DEFAULT_SAMPLING,
            "stop_token_ids": list(sampling.stop_token_ids),
            # Without stop tokens in the call, those of the model's configuration must not end the response either.
            "ignore_eos": not sampling.stop_token_ids,
            "no_stop_trim": True,
            "skip_special_tokens": False,
        },
    }


def score_body(
    ids: Sequence[int],
    *,
    request_id: str,
    adapter: str | None = None,
    start: int = 0,
    top_k: int = 0,
    frozen: bool = False,
) -> dict[str, Any]:
    """Build the /generate request that returns the log-probabilities (T=1) of ``ids`` and samples no token.

    Those of the tokens after ``start``, with the ``top_k`` most likely tokens at each. ``frozen`` weights may find
    what the sequences begin with in a cache.
    """
    most_likely = {"top_logprobs_num": top_k, "return_flat_raw_top_logprobs": True}
    return {
        **({} if adapter is None else {"lora_path": adapter}),
        **({**most_likely, "return_flat_raw_top_logprobs_b64": True} if top_k else {}),
        "rid": request_id,
        "input_ids": ids,
        # unique, so that the current weights score, never a cache
        **({} if frozen else {"extra_key": request_id}),
        "return_logprob": True,
        "logprob_start_len": start,
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0, "ignore_eos": True},
    }


def read_slice(
    answer: Mapping[str, Any], call: SamplingParams, *, vocab_size: int, budget: int, sole_version: int | None
) -> Slice:
    """Parse a response; EngineError if it is malformed or inconsistent, DataError if a kept set is too large.

    ``sole_version`` is the version of the whole slice if the response has no spans. None rejects a response without
    spans, because weights were loaded during the slice.
    """
    meta = answer.get("meta_info")
    ids = answer.get("output_ids")
    if not isinstance(meta, Mapping) or not isinstance(ids, list):
        raise EngineError("SGLang /generate: the response has no meta_info or no output_ids")
    try:
        tokens = np.array(ids, np.int64).reshape(-1)
        logprobs, stamped = _read_logprobs(meta.get("output_token_logprobs") or [])
        sets = None
        if call.kept_tokens and len(tokens):
            sets = stack_sets([np.sort(np.array(kept, np.int32)) for kept in meta["output_token_sampling_mask"]])
            logprobs = np.array(meta["output_token_sampling_logprobs"], np.float32)
        reason = meta.get("finish_reason") or {}
        kind = reason.get("type")
        spans = _read_spans(meta, len(tokens), sole_version)
        prompt, cached = int(meta.get("prompt_tokens") or 0), int(meta.get("cached_tokens") or 0)
        retractions = int(meta.get("num_retractions") or 0)
        drafts = ("spec_verify_ct", "spec_num_proposed_drafts", "spec_num_correct_drafts")
        verified, drafted, accepted = (int(meta.get(name) or 0) for name in drafts)
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
        raise EngineError(f"SGLang /generate: malformed response: {error!r}") from error
    if len(tokens) != len(logprobs) or (tokens != stamped).any():
        raise EngineError(f"SGLang /generate: {len(tokens)} tokens do not match {len(logprobs)} log-probabilities")
    if len(tokens) > budget:
        raise EngineError(f"SGLang /generate: {len(tokens)} tokens, requested {budget}")
    if len(tokens) and (tokens.min() < 0 or tokens.max() >= vocab_size):
        raise EngineError(f"SGLang /generate: a token id outside the vocabulary of {vocab_size} tokens")
    if sets is not None and sets.counts.max() > call.kept_tokens:
        raise DataError(
            f"rollout.kept_tokens={call.kept_tokens}: a token was drawn from a set of {sets.counts.max()}, because the "
            "SGLang server keeps tokens as likely as the last one of top-k; raise rollout.kept_tokens"
        )
    return Slice(
        token_ids=tokens.astype(np.int32),
        logprobs=logprobs,
        spans=spans,
        # The model's end tokens also stop a request, but only the call's stop tokens end the call.
        stopped=bool(len(tokens)) and int(tokens[-1]) in call.stop_token_ids,
        aborted=kind == "abort",
        prompt_token_count=prompt,
        cached_token_count=cached,
        retraction_count=retractions,
        kept_sets=sets,
        verify_count=verified,
        drafted_count=drafted,
        accepted_count=accepted,
    )


def _read_logprobs(entries: Sequence[Sequence[Any]]) -> tuple[Float32Array, np.ndarray[Any, Any]]:
    """Split [[logprob, id, ...], ...] into log-probabilities and token ids; null becomes NaN."""
    values = np.array([math.nan if e[0] is None else e[0] for e in entries], np.float32)
    return values, np.array([e[1] for e in entries], np.int64)


def _read_spans(meta: Mapping[str, Any], count: int, sole_version: int | None) -> tuple[TokenSpan, ...]:
    if not count:
        return ()
    found = meta.get("weight_versions")
    if not found:
        if sole_version is None or str(sole_version) != meta.get("weight_version"):
            raise ValueError("weight_versions is missing")
        return (TokenSpan(policy_version=sole_version, start=0, end=count),)
    spans = tuple(TokenSpan(policy_version=int(s["version"]), start=int(s["start"]), end=int(s["end"])) for s in found)
    edges = [0, *(s.end for s in spans)]
    if [s.start for s in spans] != edges[:-1] or edges[-1] != count or any(s.end < s.start for s in spans):
        raise ValueError(f"weight_versions {found} do not cover {count} tokens")
    return tuple(s for s in spans if s.end > s.start)


def under_adapter(piece: Slice, policy_version: int) -> Slice:
    """Stamp a slice with the version of the adapter that it named, instead of its base's."""
    span = TokenSpan(policy_version=policy_version, start=0, end=len(piece))
    return replace(piece, spans=(span,) if len(piece) else ())


def without(piece: Slice, refused: Collection[int], floor: int) -> tuple[Slice, bool]:
    """Cut a slice before its first token that must not be delivered; also return True if a lower version caused it.

    ``refused`` versions were in the server but never in service. Versions of one call never fall below ``floor``.
    """
    for number, span in enumerate(piece.spans):
        if span.policy_version not in refused and span.policy_version >= floor:
            floor = span.policy_version
            continue
        fell = span.policy_version not in refused
        kept = replace(
            piece,
            token_ids=piece.token_ids[: span.start],
            logprobs=piece.logprobs[: span.start],
            spans=piece.spans[:number],
            kept_sets=_part(piece.kept_sets, 0, span.start),
            stopped=False,
            cut=True,
        )
        return kept, fell
    return piece, False


def _part(sets: KeptSets | None, start: int, end: int) -> KeptSets | None:
    return None if sets is None else slice_sets(sets, start, end)


def check_finite(piece: Slice) -> None:
    """Raise EngineError if a log-probability is not finite."""
    for span in piece.spans:
        if not np.isfinite(piece.logprobs[span.start : span.end]).all():
            raise EngineError(
                f"SGLang /generate: log-probabilities are not finite under policy version {span.policy_version}"
            )


def chunks_of(
    piece: Slice,
    kv_min_version: Callable[[int], int],
    reason: FinishReason | None,
    *,
    cached_token_count: int,
    idle_version: int,
) -> list[Chunk]:
    """Build one chunk per span; the last chunk carries the finish reason.

    ``idle_version`` is the version of the empty chunk of a call that ends without a further token.
    """
    chunks = [
        Chunk(
            token_ids=piece.token_ids[span.start : span.end],
            behavior_logprobs=piece.logprobs[span.start : span.end],
            policy_version=span.policy_version,
            kv_min_version=kv_min_version(span.policy_version),
            kept_sets=_part(piece.kept_sets, span.start, span.end),
        )
        for span in piece.spans
    ]
    if not chunks and reason is not None:
        chunks = [empty_chunk(idle_version, reason)]
    if chunks:
        chunks[0] = replace(chunks[0], cached_token_count=cached_token_count)
        chunks[-1] = replace(chunks[-1], finish_reason=reason)
    return chunks


def read_scores(answer: Mapping[str, Any], count: int) -> Float32Array:
    """Read the log-probabilities of the tokens after the first, float32 [count - 1]; NaN for missing values."""
    try:
        values, _ = _read_logprobs(answer["meta_info"]["input_token_logprobs"])
    except (LookupError, TypeError, ValueError) as error:
        raise EngineError(f"SGLang /generate: no input_token_logprobs: {error!r}") from error
    if len(values) != count:
        raise EngineError(f"SGLang /generate: {len(values)} input_token_logprobs for {count} tokens")
    return values[1:]


def read_top_scores(answer: Mapping[str, Any]) -> tuple[Int32Array, Float32Array]:
    """Read the most likely tokens and their log-probabilities, [tokens, top_k] each."""
    try:
        meta = answer["meta_info"]
        shape = meta["input_top_logprobs_shape"]
        ids, values = (b64decode(meta[f"input_top_logprobs_{name}_flat_b64"]) for name in ("idx", "val"))
        return np.frombuffer(ids, "<i4").reshape(shape), np.frombuffer(values, "<f4").reshape(shape)
    except (LookupError, TypeError, ValueError) as error:
        raise EngineError(f"SGLang /generate: no flat input_top_logprobs, needs 0.5.23 or later: {error!r}") from error
