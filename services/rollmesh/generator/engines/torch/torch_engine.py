"""The asyncio face of the torch engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from collections.abc import Sequence as Many
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from rollmesh.errors import ConfigError, DataError, EngineError, GenerationRefused
from rollmesh.generator.engines.engine_protocol import EngineStatus, OnNewVersion
from rollmesh.generator.engines.torch.architecture import Architecture, difference, read_architecture
from rollmesh.generator.engines.torch.counters import Counters
from rollmesh.generator.engines.torch.decoder_model import DecoderModel
from rollmesh.generator.engines.torch.kv_cache import KvCache, coarse_tier_widths, tier_widths
from rollmesh.generator.engines.torch.model_thread import ModelThread, Swap
from rollmesh.generator.engines.torch.prefill_admission import prefill_batches
from rollmesh.generator.engines.torch.running_batch import Emit, RunningBatch
from rollmesh.generator.engines.torch.running_call import make_running_call
from rollmesh.generator.engines.torch.stepper import make_stepper
from rollmesh.generator.engines.torch.torch_options import TorchEngineOptions
from rollmesh.generator.engines.torch.weights import Weights, load_weights
from rollmesh.types import Chunk, Float32Array, GenerationCall, Int32Array

T = TypeVar("T")


class TorchEngine:
    """Continuous batching of one Hugging Face causal LM in this process; implements ``protocol.Engine``.

    A model thread decodes; the asyncio side only queues calls and receives chunks.
    """

    def __init__(self, options: TorchEngineOptions) -> None:
        self._options = options
        self._device = options.torch_device()
        self._dtype = options.torch_dtype()
        self._arch: Architecture | None = None
        self._worker: ModelThread | None = None
        self._closed = False
        self._load_lock = asyncio.Lock()
        self._staged: tuple[Path, Weights] | None = None

    async def start(self, folder: Path, policy_version: int) -> None:
        """Load the first policy and start the model thread; EngineError when the folder cannot be served.

        Raises ConfigError for a context that no policy of this model can have.
        """
        if self._worker is not None:
            raise EngineError("the engine has been started already")
        arch = await asyncio.to_thread(read_architecture, folder)
        if self._options.max_context_tokens > arch.max_positions:
            raise ConfigError(
                f"generator.max_context_tokens={self._options.max_context_tokens} is more than the model's "
                f"max_position_embeddings={arch.max_positions}"
            )
        weights = await asyncio.to_thread(load_weights, folder, arch, self._dtype, self._device)

        graphs = self._options.cuda_graphs

        def make_batch(counters: Counters, emit: Emit) -> RunningBatch:
            cache = KvCache(
                arch,
                token_capacity=self._options.kv_tokens,
                longest=self._options.max_context_tokens,
                dtype=self._dtype,
                device=self._device,
                widths=coarse_tier_widths if graphs else tier_widths,
            )
            in_place = graphs or self._device.type != "cpu"
            model = DecoderModel(arch, weights, self._options.max_context_tokens, self._device, swap_in_place=in_place)
            stepper = make_stepper(model, cache, self._options.slots, graphs=graphs)
            forward_tokens = self._options.forward_tokens(self._device)
            batch = RunningBatch(model, cache, stepper, self._options.slots, forward_tokens, counters, emit)
            batch.policy_version = policy_version
            return batch

        self._arch = arch
        self._worker = ModelThread(make_batch, self._options, asyncio.get_running_loop())
        self._worker.start()

    async def generate(self, call: GenerationCall) -> AsyncGenerator[Chunk, None]:
        """Stream the chunks of one call; closing the generator early frees its slot."""
        worker = self._serving()
        chunks: asyncio.Queue[Chunk | Exception] = asyncio.Queue()
        vocab = worker.batch.model.arch.vocab_size
        sequence = make_running_call(call, chunks.put_nowait, vocab_size=vocab, longest=worker.batch.cache.longest)
        self._post(worker, lambda: worker.submit(sequence))
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
                worker.post(lambda: worker.cancel(sequence))

    async def interrupt(self, trajectory_ids: Many[str] | None = None) -> int:
        """End these calls (None: all) as ``interrupted``; returns how many."""
        worker = self._serving()
        return await self._call(worker, lambda: worker.interrupt(trajectory_ids))

    def acknowledge(self, context_token_counts: Mapping[str, int]) -> None:
        """Take what callers have made durable; calls that were held for it continue."""
        worker = self._worker
        if worker is not None:
            worker.post(lambda: worker.acknowledge(context_token_counts))

    async def stage(self, folder: Path) -> None:
        """Read and pack the weights in ``folder`` beside the running calls; ``load`` of it then only swaps."""
        self._serving()
        async with self._load_lock:
            self._staged = None
            self._staged = folder, await asyncio.to_thread(self._read_compatible, folder)

    async def load(self, folder: Path, policy_version: int, mode: OnNewVersion) -> float:
        """Swap to the policy in ``folder``; returns the seconds during which decoding stood still.

        Weights are read beside the running calls, unless they are staged; loads follow each other in order.
        """
        worker = self._serving()
        async with self._load_lock:
            staged, self._staged = self._staged, None
            if staged is not None and staged[0] == folder:
                weights = staged[1]
            else:
                weights = await asyncio.to_thread(self._read_compatible, folder)
            swap = Swap(weights=weights, policy_version=policy_version, mode=mode, done=Future())
            self._post(worker, lambda: worker.request_swap(swap))
            return await asyncio.wrap_future(swap.done)

    async def score(self, sequences: Many[Int32Array]) -> list[Float32Array]:
        """Log-probabilities (T=1) of each token given its predecessors, [tokens - 1] per sequence."""
        worker = self._serving()
        vocab, longest = worker.batch.model.arch.vocab_size, self._options.max_context_tokens
        for number, ids in enumerate(sequences):
            if not 1 <= len(ids) <= longest:
                raise DataError(f"sequences[{number}]: {len(ids)} tokens, expected 1 to {longest}")
            if int(ids.min()) < 0 or int(ids.max()) >= vocab:
                raise DataError(f"sequences[{number}]: a token id is outside the vocabulary of {vocab} tokens")
        return await self._call(worker, lambda: self._score(worker.batch.model, sequences))

    async def pause(self) -> None:
        """Stop decoding; running calls are held."""
        await self._set_paused(True)

    async def resume(self) -> None:
        """Continue decoding."""
        await self._set_paused(False)

    def status(self) -> EngineStatus:
        """Load and counters, without waiting for a decode step; EngineError when the model thread has failed."""
        worker = self._worker
        if worker is None:
            raise EngineError("the engine has not been started")
        if worker.failure is not None:
            raise worker.failure
        counters = worker.counters
        return EngineStatus(
            policy_version=worker.batch.policy_version,
            running_count=worker.batch.running_count,
            waiting_count=len(worker.waiting),
            slot_count=self._options.slots,
            kv_tokens_used=worker.batch.tokens_used,
            kv_token_capacity=self._options.kv_tokens,
            generated_token_total=counters.generated_tokens,
            prefill_token_total=counters.prefill_tokens,
            reprefill_token_total=counters.reprefill_tokens,
            cached_token_total=counters.cached_tokens,
            decode_step_total=counters.decode_steps,
            busy_seconds_total=counters.busy_seconds,
            running_slot_seconds_total=counters.running_slot_seconds,
            held_back_total=counters.held_back,
            paused=worker.paused,
        )

    async def aclose(self) -> None:
        """End running calls as ``interrupted`` and stop the model thread."""
        if self._worker is None or self._closed:
            return
        self._closed = True
        worker = self._worker
        worker.post(worker.stop)
        await asyncio.to_thread(worker.join)

    def _serving(self) -> ModelThread:
        if self._worker is None:
            raise EngineError("the engine has not been started")
        if self._closed:
            raise GenerationRefused("the engine has stopped")
        if self._worker.failure is not None:
            raise self._worker.failure
        return self._worker

    def _post(self, worker: ModelThread, command: Callable[[], None]) -> None:
        if not worker.post(command):
            raise worker.failure or GenerationRefused("the engine has stopped")

    def _read_compatible(self, folder: Path) -> Weights:
        arch = read_architecture(folder)
        assert self._arch is not None
        if differs := difference(self._arch, arch):
            raise EngineError(f"{folder}: another architecture: {differs}")
        # On a GPU the new weights are copied into those in use at the swap (Model.swap), so they wait in host memory.
        return load_weights(folder, arch, self._dtype, torch.device("cpu"))

    async def _set_paused(self, paused: bool) -> None:
        worker = self._serving()

        def command() -> None:
            worker.paused = paused

        await self._call(worker, command)

    async def _call(self, worker: ModelThread, function: Callable[[], T]) -> T:
        """Run ``function`` in the model thread and return its result."""
        done: Future[T] = Future()

        def command() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(function())
            except Exception as error:  # the caller's to handle: the model thread goes on
                done.set_exception(error)

        self._post(worker, command)
        return await asyncio.wrap_future(done)

    def _score(self, model: DecoderModel, sequences: Many[Int32Array]) -> list[Float32Array]:
        results: list[Float32Array] = [np.empty(0, np.float32) for _ in sequences]
        for batch in prefill_batches([len(ids) for ids in sequences], self._options.forward_tokens(self._device)):
            width = len(sequences[batch[0]])
            if width < 2:
                continue
            tokens = np.zeros((len(batch), width), np.int64)
            for row, index in enumerate(batch):
                tokens[row, : len(sequences[index])] = sequences[index]
            logprobs = model.score(torch.from_numpy(tokens).to(self._device)).cpu().numpy()
            for row, index in enumerate(batch):
                results[index] = logprobs[row, : len(sequences[index]) - 1].copy()
        return results
