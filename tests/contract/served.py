"""A served model and its twin: calls into the server over HTTP, and the logprobs that a plain HF forward pass gives."""

import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Self

import httpx
import torch

from ..kit.generation import load_model
from .contract_kit import KEY

TOLERANCE = 1e-4
"""Between two float32 implementations of one model, in nats."""
PROMPT = [30, 40, 41, 42, 50, 20, 21, 22]
LONG = 900
"""Tokens of a request that is still under way when the test has done with it what it means to do; 16 fit the cache."""
_MOST_REQUESTS = 32
_SECONDS = 180.0
"""For whatever takes one on an idle machine."""
_ANSWER_SECONDS = 0.3
"""For the answer to a request that has ended."""
ATTEMPTS = 5
"""To meet requests under way."""


class Policies:
    """Policy versions by number: their folders, and their logprobs."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = folders

    def logprobs(self, version: int, ids: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
        """log_softmax(z / T) at every position, float32 [tokens, vocabulary]: row i is about token i + 1."""
        with torch.inference_mode():
            logits = load_model(self.folders[version])(torch.tensor([ids])).logits[0]
        return torch.log_softmax(logits / temperature, dim=-1)

    def mixed_logprobs(self, old: int, new: int, ids: Sequence[int], swap: int) -> torch.Tensor:
        """As ``logprobs``, where ``ids[:swap]`` went through the old weights and the rest, on their cache, through
        the new ones."""
        with torch.inference_mode():
            before = load_model(self.folders[old])(torch.tensor([ids[:swap]]), use_cache=True)
            cache = before.past_key_values
            after = load_model(self.folders[new])(torch.tensor([ids[swap:]]), past_key_values=cache, use_cache=True)
        return torch.log_softmax(torch.cat([before.logits[0], after.logits[0]]), dim=-1)


class Answer:
    """A finished request."""

    def __init__(self, prompt: Sequence[int], body: dict[str, Any]) -> None:
        self.prompt = list(prompt)
        self.tokens: list[int] = body["output_ids"]
        self.meta: dict[str, Any] = body["meta_info"]
        self.logprobs = [entry[0] for entry in self.meta["output_token_logprobs"]]
        self.spans = [(int(s["version"]), s["start"], s["end"]) for s in self.meta["weight_versions"]]
        self.finish: str = self.meta["finish_reason"]["type"]
        self.cached_token_count: int = self.meta["cached_tokens"]

    def gap(self, expected: torch.Tensor, start: int = 0, end: int | None = None) -> float:
        """Largest difference of the server's logprobs from ``expected`` over tokens start to end of the answer."""
        first = len(self.prompt) - 1
        wanted = range(start, len(self.tokens) if end is None else end)
        return max(abs(self.logprobs[i] - expected[first + i, self.tokens[i]].item()) for i in wanted)

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.tokens


class Served:
    """Calls into one server; a context manager."""

    def __init__(self, url: str, policies: Policies) -> None:
        self.policies = policies
        # None is kept: the server closes one that was idle for 5 s, perhaps just when the next request is sent.
        limits = httpx.Limits(max_connections=_MOST_REQUESTS + 8, max_keepalive_connections=0)
        key = {"Authorization": f"Bearer {KEY}"}
        self._http = httpx.Client(base_url=url, headers=key, timeout=_SECONDS, limits=limits)
        self._pool = ThreadPoolExecutor(_MOST_REQUESTS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.post("/continue_generation")
        self._pool.shutdown()
        self._http.close()

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self._http.post(path, json=body)

    def get(self, path: str) -> httpx.Response:
        return self._http.get(path)

    def reset(self) -> None:
        """Policy version 0 is served, nothing runs, the cache is empty."""
        self.post("/continue_generation")
        assert self.load(0).status_code == 200

    def load(self, version: int, flush_cache: bool = True) -> httpx.Response:
        folder = str(self.policies.folders[version])
        return self.post(
            "/update_weights_from_disk", model_path=folder, weight_version=str(version), flush_cache=flush_cache
        )

    def pause(self, mode: str) -> None:
        assert self.post("/pause_generation", mode=mode).status_code == 200

    def resume(self) -> None:
        assert self.post("/continue_generation").status_code == 200

    def version(self) -> str:
        """The version that the server's front says it serves."""
        return str(self.get("/model_info").json()["weight_version"])

    def wait_running(self, futures: Sequence[Future[Answer]]) -> bool:
        """Wait until all these requests decode, by a report that the scheduler made after this call; False once one of
        them has ended."""
        called, deadline = time.time(), time.monotonic() + _SECONDS
        while not any(future.done() for future in futures):
            if self._all_run(len(futures), called):
                return True
            assert time.monotonic() < deadline, f"not all {len(futures)} run: the server says {self._load()}"
            time.sleep(0.01)
        return False

    def pause_running(self, futures: Sequence[Future[Answer]], mode: str) -> bool:
        """Pause while all these requests are under way; False, after which the server runs, if one of them has ended.

        A paused server reports no load, so a request that had just ended is known by its answer, which may be on its
        way.
        """
        self.pause(mode)
        if not wait(futures, timeout=_ANSWER_SECONDS, return_when=FIRST_COMPLETED).done:
            return True
        self.resume()
        return False

    def attempts(self, count: int) -> Iterator[list[Future[Answer]]]:
        """Send so many long requests, again and again, until the caller has met all of them under way.

        All of them decode when they are yielded. On a busy machine the first may end before the last arrives, before
        this process reads a report, or before the caller has done with them what it means to do.
        """
        for _ in range(ATTEMPTS):
            futures = [self.start(prompt, LONG, extra_key="0") for prompt in prompts(count)]
            if self.wait_running(futures):
                yield futures
            for future in futures:
                future.result()
            self.reset()
        raise AssertionError(f"{count} requests were never met under way at once, in {ATTEMPTS} attempts")

    def paused_under(self, count: int, mode: str) -> list[Future[Answer]]:
        """Send so many long requests and pause while all of them are under way."""
        return next(futures for futures in self.attempts(count) if self.pause_running(futures, mode))

    def _all_run(self, count: int, since: float) -> bool:
        """Whether the scheduler, in a report of after ``since`` (Unix time, s), has so many running requests."""
        load = self._load()
        return bool(load["timestamp"] > since and load["num_running_reqs"] == count)

    def _load(self) -> dict[str, Any]:
        load: dict[str, Any] = self.get("/v1/loads").json()["loads"][0]
        return load

    def send(
        self,
        prompt: Sequence[int],
        count: int,
        *,
        extra_key: str | None = None,
        rid: str | None = None,
        masked: bool = False,
        **sampling: Any,
    ) -> httpx.Response:
        sampling = {"max_new_tokens": count, "temperature": 1.0, "ignore_eos": True, **sampling}
        return self.post(
            "/generate",
            input_ids=list(prompt),
            rid=rid or uuid.uuid4().hex,
            extra_key=extra_key,
            return_logprob=True,
            return_sampling_mask=masked,
            sampling_params=sampling,
        )

    def generate(self, prompt: Sequence[int], count: int, **options: Any) -> Answer:
        response = self.send(prompt, count, **options)
        assert response.status_code == 200, response.text
        return Answer(prompt, response.json())

    def start(self, prompt: Sequence[int], count: int, **options: Any) -> Future[Answer]:
        """Send a request from another thread."""
        return self._pool.submit(self.generate, prompt, count, **options)


def prompts(count: int) -> list[list[int]]:
    return [[20 + i, *PROMPT] for i in range(count)]
