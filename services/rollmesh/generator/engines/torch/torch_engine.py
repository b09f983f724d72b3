"""The asyncio interface of the torch engine."""

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from rollmesh.config.generator import GeneratorConfig
from rollmesh.errors import ConfigError, EngineError, GenerationRefused
from rollmesh.generator.engines.call_limits import check_call, check_context_length, check_mode, check_sequences
from rollmesh.generator.engines.engine_protocol import EngineStatus, OnNewVersion
from rollmesh.generator.engines.policy_folders import AdapterSettings
from rollmesh.generator.engines.torch.adapters import BASE, AdapterReader, AdapterStack
from rollmesh.generator.engines.torch.architecture import Architecture, difference, read_architecture
from rollmesh.generator.engines.torch.decode_step import Stepper
from rollmesh.generator.engines.torch.decoder_model import DecoderModel, prefill_batches
from rollmesh.generator.engines.torch.kv_cache import KvCache, tier_widths
from rollmesh.generator.engines.torch.model_thread import ModelThread, Swap
from rollmesh.generator.engines.torch.running_batch import RunningBatch
from rollmesh.generator.engines.torch.slots import RunningCall
from rollmesh.generator.engines.torch.speculation import MOST_CPU_TOKENS, MOST_TOKENS, Speculation
from rollmesh.generator.engines.torch.weights import StagedWeights, Weights, load_weights
from rollmesh.runtime.logging import get_logger
from rollmesh.types import Chunk, Float32Array, GenerationCall, Int32Array

T = TypeVar("T")

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Compute dtype by ``model.dtype``."""


class TorchEngine:
    """Engine that batches calls of one Hugging Face causal LM in this process; implements ``engine_protocol.Engine``.

    A model thread decodes; the asyncio thread only queues calls and receives chunks.
    """

    def __init__(
        self,
        config: GeneratorConfig,
        dtype: str = "float32",
        adapter: AdapterSettings | None = None,
        *,
        several_turns: bool = True,
    ) -> None:
        self._config = config
        self._several_turns = several_turns
        self._adapter = adapter
        self._adapter_reader: AdapterReader | None = None
        self._base_version = -1
        self._device = _device(config.device)
        self._dtype = _DTYPES[dtype]
        self._thread: ModelThread | None = None
        self._closed = False
        self._load_lock = asyncio.Lock()
        self._staged: StagedWeights | None = None
        self._tokenizer: bytes | None = None
        """Digest of the tokenizer of the newest policy; None if its folder has none."""

    async def start(self, folder: Path, policy_version: int) -> None:
        """Load the first policy and start the model thread.

        Raises EngineError if the folder cannot be served, ConfigError if the model does not support the context length.
        """
        if self._thread is not None:
            raise EngineError("the engine has been started already")
        arch = await asyncio.to_thread(read_architecture, folder)
        check_context_length(self._config.max_context_tokens, arch.max_positions)
        weights = await asyncio.to_thread(load_weights, folder, arch, self._dtype, self._device)
        self._base_version = policy_version
        if self._adapter is not None:
            config = self._adapter.config
            self._adapter_reader = await asyncio.to_thread(AdapterReader.of_base, folder, arch, config, self._dtype)
        self._tokenizer = await asyncio.to_thread(_tokenizer_digest, folder)
        batch = self._make_batch(arch, weights, policy_version)
        self._thread = ModelThread(batch, self._config, asyncio.get_running_loop())
        self._thread.start()

    def _make_batch(self, arch: Architecture, weights: Weights, policy_version: int) -> RunningBatch:
        config, graphs, speculation, most_tokens = self._config, self._config.cuda_graphs, None, 0
        if config.speculation == "history":
            cpu = self._device.type == "cpu"
            most_tokens = MOST_CPU_TOKENS if cpu else MOST_TOKENS
            speculation = Speculation(arch.vocab_size, most_tokens, time.thread_time if cpu else time.perf_counter)
        cache = KvCache(
            arch,
            token_capacity=config.kv_tokens,
            widths=tier_widths(min(config.max_context_tokens, config.kv_tokens), first=256 if graphs else 128),
            dtype=self._dtype,
            device=self._device,
            several_turns=self._several_turns,
        )
        stack = None
        if self._adapter is not None and self._adapter_reader is not None:
            stack = AdapterStack(
                self._adapter_reader.shapes(),
                self._dtype,
                self._device,
                base_version=policy_version,
                rows=2 * max(config.slots, most_tokens),  # padding less than doubles the rows of a step
                static=graphs,
            )
            stack.reserve(self._adapter.kept_versions + 1)
        in_place = graphs or self._device.type != "cpu"
        model = DecoderModel(
            arch, weights, config.max_context_tokens, self._device, swap_in_place=in_place, adapters=stack
        )
        stepper = Stepper(model, cache, config.slots, most_tokens=most_tokens, padded=graphs)
        return RunningBatch(model, cache, stepper, config.slots, policy_version, speculation)

    async def generate(self, call: GenerationCall) -> AsyncGenerator[Chunk, None]:
        thread = self._serving()
        chunks: asyncio.Queue[Chunk | Exception] = asyncio.Queue()
        vocab_size, longest = thread.batch.model.arch.vocab_size, thread.batch.cache.longest
        budget = check_call(call, vocab_size=vocab_size, longest=longest)
        running = RunningCall(request=call, deliver=chunks.put_nowait, budget=budget)
        self._post(thread, lambda: thread.submit(running))
        ended = False
        try:
            while not ended:
                chunk = await chunks.get()
                ended = isinstance(chunk, Exception) or chunk.finish_reason is not None
                if isinstance(chunk, Exception):
                    raise chunk
                yield chunk
        finally:
            if not ended:
                thread.post(lambda: thread.cancel(running))

    async def interrupt(self, trajectory_ids: Sequence[str] | None = None) -> int:
        return await self._call(lambda thread: thread.interrupt(trajectory_ids))

    def acknowledge(self, context_token_counts: Mapping[str, int]) -> None:
        thread = self._thread
        if thread is not None:
            thread.post(lambda: thread.acknowledge(context_token_counts))

    async def stage(self, folder: Path, policy_version: int) -> bool:
        model = self._serving().batch.model
        async with self._load_lock:
            if self._adapter_reader is not None:
                await self._load_adapter(self._adapter_reader, folder, policy_version)
                return True
            self._staged = None
            weights = await asyncio.to_thread(self._read_compatible, folder, model.arch)
            self._staged = StagedWeights(folder=folder, policy_version=policy_version, weights=weights)
            return self._staged.scorable_on(self._device)

    async def load(self, folder: Path, policy_version: int, mode: OnNewVersion) -> float:
        """Swap to the policy in ``folder``; unless it is staged, its weights are read while calls run."""
        thread = self._serving()
        check_mode(mode, with_adapter=self._adapter is not None)
        async with self._load_lock:
            if self._adapter is not None and self._adapter_reader is not None:
                if not self._is_loaded(policy_version):
                    await self._load_adapter(self._adapter_reader, folder, policy_version)
                kept = self._adapter.kept_versions
                await self._call(lambda thread: thread.serve_adapter(policy_version, kept))
                return 0.0
            staged, self._staged = self._staged, None
            if staged is not None and staged.folder == folder:
                weights = staged.weights
            else:
                weights = await asyncio.to_thread(self._read_compatible, folder, thread.batch.model.arch)
            await self._keep_drafts_of(folder)
            replaced = [thread.batch.model.weights]
            swap = Swap(weights=weights, policy_version=policy_version, mode=mode, done=Future())
            self._post(thread, lambda: thread.request_swap(swap))
            held_seconds = await asyncio.wrap_future(swap.done)
            # To free gigabytes takes a while: here, calls decode meanwhile.
            await asyncio.to_thread(replaced.clear)
            return held_seconds

    async def _keep_drafts_of(self, folder: Path) -> None:
        """Drop all drafts if the policy in ``folder`` has another tokenizer than the one before."""
        if self._config.speculation != "history":
            return
        before, self._tokenizer = self._tokenizer, await asyncio.to_thread(_tokenizer_digest, folder)
        if None not in (before, self._tokenizer) and before != self._tokenizer:
            await self._call(lambda thread: thread.batch.forget_drafts())
            get_logger("generator").warning("drafts_dropped", reason="another tokenizer", folder=str(folder))

    async def _load_adapter(self, reader: AdapterReader, folder: Path, version: int) -> None:
        """Read an adapter and load it beside the others; the base has none."""
        if version == self._base_version:
            return
        factors = await asyncio.to_thread(reader.read, folder)
        await self._call(lambda thread: thread.batch.put_adapter(version, factors))

    def _is_loaded(self, version: int) -> bool:
        batch = self._serving().batch
        if batch.adapters is None:
            return version == batch.policy_version
        return version == self._base_version or version in batch.adapters.versions

    async def score(self, sequences: Sequence[Int32Array], policy_version: int | None = None) -> list[Float32Array]:
        vocab_size, longest = self._serving().batch.model.arch.vocab_size, self._config.max_context_tokens
        check_sequences(sequences, vocab_size=vocab_size, longest=longest)
        staged = self._staged
        if staged is not None and staged.policy_version == policy_version and staged.scorable_on(self._device):
            # In a thread of its own, while the model thread decodes with the weights in use.
            model = self._serving().batch.model.with_weights(staged.weights)
            return await asyncio.to_thread(_score, model, sequences)
        if policy_version is not None and not self._is_loaded(policy_version):
            raise EngineError(f"policy version {policy_version} is not loaded; stage it before it is scored")

        def score_in_use(thread: ModelThread) -> list[Float32Array]:
            batch, adapters = thread.batch, thread.batch.adapters
            version = batch.policy_version if policy_version is None else policy_version
            return _score(batch.model, sequences, BASE if adapters is None else adapters.place_of(version))

        return await self._call(score_in_use)

    async def pause(self) -> None:
        await self._call(lambda thread: thread.set_paused(True))

    async def resume(self) -> None:
        await self._call(lambda thread: thread.set_paused(False))

    async def respond(self) -> None:
        await self._call(lambda thread: None)

    def status(self) -> EngineStatus:
        thread = self._thread
        if thread is None:
            raise EngineError("the engine has not been started")
        if thread.failure is not None:
            raise thread.failure
        batch = thread.batch
        return EngineStatus(
            policy_version=batch.policy_version,
            running_count=batch.running_count,
            waiting_count=len(thread.waiting),
            slot_count=self._config.slots,
            kv_tokens_used=batch.slots.cached_total,
            kv_token_capacity=self._config.kv_tokens,
            paused=thread.paused,
            decode_step_total=batch.decode_steps,
            decode_seconds_total=batch.decode_seconds,
            speculation=None if batch.speculation is None else batch.speculation.counters,
            **asdict(batch.counters),
        )

    async def aclose(self) -> None:
        if self._thread is None or self._closed:
            return
        self._closed = True
        thread = self._thread
        thread.post(thread.stop)
        await asyncio.to_thread(thread.join)

    def _serving(self) -> ModelThread:
        if self._thread is None:
            raise EngineError("the engine has not been started")
        if self._closed:
            raise GenerationRefused("the engine has stopped")
        if self._thread.failure is not None:
            raise self._thread.failure
        return self._thread

    def _post(self, thread: ModelThread, command: Callable[[], None]) -> None:
        if not thread.post(command):
            raise thread.failure or GenerationRefused("the engine has stopped")

    def _read_compatible(self, folder: Path, running: Architecture) -> Weights:
        arch = read_architecture(folder)
        if differs := difference(running, arch):
            raise EngineError(f"{folder}: another architecture: {differs}")
        # On a GPU the swap copies the new weights into those in use (DecoderModel.swap), so they stay in host memory.
        return load_weights(folder, arch, self._dtype, torch.device("cpu"))

    async def _call(self, function: Callable[[ModelThread], T]) -> T:
        thread = self._serving()
        done: Future[T] = Future()

        def command() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(function(thread))
            except Exception as error:  # for the caller to handle: the model thread continues
                done.set_exception(error)

        self._post(thread, command)
        return await asyncio.wrap_future(done)


def _tokenizer_digest(folder: Path) -> bytes | None:
    file = folder / "tokenizer.json"
    return hashlib.sha256(file.read_bytes()).digest() if file.is_file() else None


def _device(name: str) -> torch.device:
    """Return the device for ``generator.device``, CUDA for ``auto`` if available; ConfigError if CUDA is absent."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"generator.device={name}: this machine or this build of torch has no CUDA; set cpu or auto")
    return torch.device(name)


@torch.inference_mode()
def _score(model: DecoderModel, sequences: Sequence[Int32Array], place: int = BASE) -> list[Float32Array]:
    """Score sequences under the adapter in ``place``, [tokens - 1] per sequence."""
    results: list[Float32Array] = [np.empty(0, np.float32) for _ in sequences]
    for batch in prefill_batches([len(ids) for ids in sequences], model.forward_tokens):
        width = len(sequences[batch[0]])
        if width < 2:
            continue
        tokens = np.zeros((len(batch), width), np.int64)
        for row, index in enumerate(batch):
            tokens[row, : len(sequences[index])] = sequences[index]
        logprobs = model.score(torch.from_numpy(tokens).to(model.device), place).cpu().numpy()
        for row, index in enumerate(batch):
            results[index] = logprobs[row, : len(sequences[index]) - 1].copy()
    return results
