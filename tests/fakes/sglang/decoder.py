"""The stand-in's model side: real logits, a key-value cache per request, weights that can be swapped under it."""

import asyncio
import json
from base64 import b64encode
from collections import deque
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, DynamicCache

_PREFIXES = 64
"""Contexts kept in the prefix cache, by key."""


@dataclass(eq=False)
class Request:
    """One /generate request."""

    rid: str
    input_ids: list[int]
    params: dict[str, Any]
    extra_key: str
    start: int
    """Token from which on input log-probabilities are wanted; -1 for none."""
    done: asyncio.Future[dict[str, Any]]
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    input_logprobs: list[list[Any]] = field(default_factory=list)
    top_k: int = 0
    input_top: dict[str, Any] = field(default_factory=dict)
    version_events: list[tuple[str, int]] = field(default_factory=list)
    cache: DynamicCache | None = None
    cached_tokens: int = 0
    aborting: bool = False
    retractions: int = 0
    adapter: str = ""
    wants_mask: bool = False
    masks: list[list[int]] = field(default_factory=list)
    """Tokens that each token was drawn from, most likely first."""
    mask_logprobs: list[float] = field(default_factory=list)


class Decoder:
    """Continuous batching, one row at a time."""

    def __init__(self, folder: str, weight_version: str, slots: int) -> None:
        self.model = load_model(folder)
        self.adapters: dict[str, Any] = {}
        """Models with an adapter's product added to their weights, by its name."""
        self.weight_version = weight_version
        self.slots = slots
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.prefixes: dict[str, deque[tuple[list[int], DynamicCache]]] = {}
        self.go = asyncio.Event()
        self.paused = False
        self.eos = set(_ids(self.model.generation_config.eos_token_id) + _ids(self.model.config.eos_token_id))

    @property
    def vocab_size(self) -> int:
        return int(self.model.config.vocab_size)

    def add(self, request: Request) -> None:
        self.waiting.append(request)
        self.go.set()

    async def run(self) -> None:
        """Decode for ever."""
        while True:
            if self.paused or not (self.running or self.waiting):
                self.go.clear()
                await self.go.wait()
                continue
            while self.waiting and len(self.running) < self.slots:
                request = self.waiting.popleft()
                self.running.append(request)
                self._prefill(request)
                await asyncio.sleep(0)
                if self.paused:
                    break
            if not self.paused:
                for request in [r for r in self.running if r.cache is not None]:
                    self._step(request)
            await asyncio.sleep(0)

    def abort(self, rid: str, everything: bool) -> None:
        for request in list(self.waiting):
            if everything or request.rid.startswith(rid):
                self.waiting.remove(request)
                request.output_ids, request.logprobs, request.version_events = [], [], []
                request.masks, request.mask_logprobs = [], []
                self._finish(request, {"type": "abort", "message": "Abort in waiting queue"})
        for request in self.running:
            request.aborting |= everything or request.rid.startswith(rid)

    def retract(self) -> None:
        """Running requests go back to the queue and lose their cache."""
        for request in reversed(self.running):
            request.cache = None
            request.retractions += 1
            self.waiting.appendleft(request)
        self.running.clear()

    def swap(self, folder: str, version: str | None) -> None:
        """Load other weights; requests with tokens keep their counts."""
        self.model = load_model(folder)
        if version is not None and version != self.weight_version:
            for request in (*self.running, *self.waiting):
                if request.output_ids:
                    request.version_events.append((self.weight_version, len(request.output_ids)))
            self.weight_version = version

    def add_adapter(self, name: str, folder: Path, rank: int, targets: list[str]) -> None:
        """Load an adapter as strictly as the real server with --lora-strict-loading; ValueError says why not."""
        config = json.loads((folder / "adapter_config.json").read_text())
        if name in self.adapters:
            raise ValueError(f"Failed to load LoRA adapter {name} because it is already loaded")
        if config["r"] > rank or not set(config["target_modules"]) <= set(targets):
            raise ValueError(f"LoRA adapter {name} with rank {config['r']} is incompatible with the memory pool")
        model, factors = deepcopy(self.model), load_file(folder / "adapter_model.safetensors")
        with torch.no_grad():
            for key, a in factors.items():
                if ".lora_A." in key:
                    layer = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                    b = factors[key.replace("_A.", "_B.")]  # as the real one: nothing but alpha / r, whatever is said
                    model.get_submodule(layer).weight += config["lora_alpha"] / config["r"] * b @ a
        self.adapters[name] = model

    def _model_of(self, request: Request) -> Any:
        return self.adapters[request.adapter] if request.adapter else self.model

    def _prefill(self, request: Request) -> None:
        context = request.input_ids + request.output_ids
        known_part = context if request.start < 0 else context[: request.start + 1]
        request.cache, known = self._cached(request.extra_key, known_part)
        with torch.inference_mode():
            out = self._model_of(request)(
                torch.tensor([context[known:]]), past_key_values=request.cache, use_cache=True
            )
        if request.start >= 0:
            logprobs = torch.log_softmax(out.logits[0, request.start - known :].float(), -1)[:-1]
            scored = context[request.start + 1 :]
            picked = logprobs.gather(1, torch.tensor(scored)[:, None]).squeeze(1).tolist()
            request.input_logprobs = [[None, context[request.start], None]]
            request.input_logprobs += [[p, t, None] for p, t in zip(picked, scored, strict=True)]
            if request.top_k:
                values, ids = logprobs.topk(request.top_k)
                request.input_top = {
                    "input_top_logprobs_val_flat_b64": _base64(values.numpy()),
                    "input_top_logprobs_idx_flat_b64": _base64(ids.int().numpy()),
                    "input_top_logprobs_shape": list(ids.shape),
                }
        elif not request.output_ids:
            request.cached_tokens = known
        if request.params["max_new_tokens"] == 0:
            self._finish(request, {"type": "length", "length": 0})
        else:
            self._take(request, out.logits[0, -1].float())

    def _step(self, request: Request) -> None:
        with torch.inference_mode():
            last = torch.tensor([[request.output_ids[-1]]])
            out = self._model_of(request)(last, past_key_values=request.cache, use_cache=True)
        self._take(request, out.logits[0, -1].float())

    def _take(self, request: Request, logits: torch.Tensor) -> None:
        params = request.params
        temperature = params["temperature"]
        logprobs = torch.log_softmax(logits / (temperature or 1.0), -1)
        kept, order = self._kept(logprobs, params)
        token = int(logits.argmax()) if temperature == 0 else int(order[torch.multinomial(kept, 1)])
        if request.wants_mask:
            request.masks.append(order[kept > 0].tolist())
            request.mask_logprobs.append(float((kept[order == token] / kept.sum()).log()))
        request.output_ids.append(token)
        request.logprobs.append(float(logprobs[token]))
        stops = set() if params.get("ignore_eos") else self.eos | set(params.get("stop_token_ids") or ())
        if request.aborting:
            self._finish(request, {"type": "abort", "message": "Aborted", "status_code": None})
        elif token in stops:
            self._finish(request, {"type": "stop", "matched": token})
        elif len(request.output_ids) >= params["max_new_tokens"]:
            self._finish(request, {"type": "length", "length": params["max_new_tokens"]})

    def _kept(self, logprobs: torch.Tensor, params: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Probabilities in falling order with 0 for what is dropped, and the tokens in this order."""
        if logprobs.isnan().any():  # the real one samples something too, and says null
            logprobs = torch.zeros_like(logprobs)
        probabilities, order = logprobs.exp().sort(descending=True)
        before = probabilities.cumsum(0) - probabilities
        probabilities[before > params.get("top_p", 1.0)] = 0
        if (top_k := params.get("top_k", -1)) > 0:
            probabilities[top_k:] = 0
        probabilities[probabilities < params.get("min_p", 0.0) * probabilities[0]] = 0
        return probabilities, order

    def _cached(self, key: str, context: list[int]) -> tuple[DynamicCache, int]:
        """A copy of the longest cached prefix under this key, and its length; the last token is never cached."""
        best, source = 0, None
        for tokens, cache in self.prefixes.get(key, ()):
            same = next((i for i, (a, b) in enumerate(zip(context, tokens, strict=False)) if a != b), None)
            length = min(len(context) - 1, len(tokens) if same is None else same)
            if length > best:
                best, source = length, cache
        if source is None:
            return DynamicCache(), 0
        copy = deepcopy(source)
        copy.crop(best - copy.get_seq_length())
        return copy, best

    def _finish(self, request: Request, reason: dict[str, Any]) -> None:
        if request in self.running:
            self.running.remove(request)
        context = request.input_ids + request.output_ids
        if request.cache is not None:
            known = self.prefixes.setdefault(request.extra_key, deque(maxlen=_PREFIXES))
            known.append((context[: request.cache.get_seq_length()], request.cache))
        count = len(request.output_ids)
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": reason,
            "weight_version": self.weight_version,
            "prompt_tokens": len(request.input_ids),
            "cached_tokens": request.cached_tokens,
            "completion_tokens": count,
            "num_retractions": request.retractions,
            "input_token_logprobs": request.input_logprobs,
            **request.input_top,
            "output_token_logprobs": [[p, t, None] for p, t in zip(request.logprobs, request.output_ids, strict=True)],
            "weight_versions": self._spans(request.version_events, count),
        }
        if request.wants_mask:
            meta["output_token_sampling_mask"] = request.masks
            meta["output_token_sampling_logprobs"] = request.mask_logprobs
        if not request.done.done():
            request.done.set_result({"text": "", "output_ids": request.output_ids, "meta_info": meta})

    def _spans(self, events: list[tuple[str, int]], count: int) -> list[dict[str, Any]]:
        spans: list[dict[str, Any]] = []
        for version, end in [*events, (self.weight_version, count)]:
            start = spans[-1]["end"] if spans else 0
            if not spans or end > start:
                spans.append({"version": version, "start": start, "end": end})
        return spans


def _base64(values: Any) -> str:
    return b64encode(values.tobytes()).decode()


def load_model(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _ids(value: Any) -> list[int]:
    if value is None:
        return []
    return [int(v) for v in value] if isinstance(value, list) else [int(value)]
