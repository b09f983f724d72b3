"""Trial of the trainer's processes and threads: ``python -m rollmesh.trainer.core_trial RUN_FILE CORES LAUNCHER``.

It prints a line of JSON for each way to use the cores: processes, threads of each, seconds of a train step on random
answers; null for one that fails or takes too long. The libraries are imported once; the ranks of a way are forked. On a
GPU there is nothing to choose, and no line.
"""

import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from rollmesh.checkpoints.describe import architecture_of, read_json
from rollmesh.config import RunConfig, load_run_config
from rollmesh.config.recipes import resolve_model
from rollmesh.config.trainer import AlgorithmConfig
from rollmesh.runtime.lifecycle import die_with_parent
from rollmesh.trainer.learner.algorithm_trial import trial_batch
from rollmesh.trainer.learner.distributed import World, leave_world, pick_device
from rollmesh.trainer.learner.policy_trainer import PolicyTrainer
from rollmesh.types import Batch

_MOST_PROCESSES = 8
_STEPS = 4
"""Train steps of each way; the fastest counts, because the first one and the machine's other work only add time."""
_SECONDS = 20.0
"""Time for the steps of one way; fewer steps count when they take longer."""
_LONGEST = 256
_MEMBERS = 8
_MOST_TOKENS = 4096
"""Tokens of a step per process."""
_WORK = 5e10
"""Tokens of a step times bytes of the weights, so that the steps of a large model end in time too: about 3 seconds."""


def ways(cores: int) -> list[tuple[int, int]]:
    """Return the (processes, threads of each) to try, one process of one thread first."""
    processes = [2**power for power in range(cores.bit_length()) if 2**power <= min(cores, _MOST_PROCESSES)]
    return list(dict.fromkeys([(1, 1), *((count, cores // count) for count in processes)]))


def random_batch(config: RunConfig, cores: int) -> Batch:
    """Return a batch of random answers that fills a micro-batch of each process, or less of a large model."""
    folder = resolve_model(config.model.path)
    vocabulary = architecture_of(read_json(folder / "config.json"), str(folder)).vocab_size
    tokens = min(cores, _MOST_PROCESSES) * min(config.trainer.tokens_per_microbatch, _MOST_TOKENS)
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    tokens = max(_MEMBERS, min(tokens, int(_WORK / weights)))
    length = min(_LONGEST, config.rollout.max_new_tokens, tokens // _MEMBERS)
    return trial_batch(tokens // (_MEMBERS * length), _MEMBERS, np.random.default_rng(0), lambda _: length, vocabulary)


def _rank(
    config: RunConfig, batch: Batch, way: tuple[int, int], trial: int, meet: str, result: Connection, rank: int
) -> None:
    """Train as one rank of the ``trial`` process, and send the seconds of each step."""
    processes, threads = way
    die_with_parent(trial)
    torch.set_num_threads(threads)
    if processes > 1:
        dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=processes)
    section = config.trainer.model_copy(update={"algorithm": AlgorithmConfig(), "minibatches": 1, "device": "cpu"})
    world = World(rank=rank, size=processes, local_rank=rank)
    trainer = PolicyTrainer(resolve_model(config.model.path), section, adapter=config.model.adapter, world=world)
    for step in range(1, _STEPS + 1):
        began = time.perf_counter()
        trainer.train(Batch(train_step=step, groups=batch.groups), {0: 0})
        if rank == 0:
            result.send(time.perf_counter() - began)
    leave_world()


def step_seconds(config: RunConfig, batch: Batch, way: tuple[int, int]) -> float | None:
    """Return the seconds of the fastest step; None when the first one fails or takes more than ``_SECONDS``."""
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        work = partial(_rank, config, batch, way, os.getpid(), f"{folder}/ranks", sending)
        ranks = [context.Process(target=work, args=(rank,)) for rank in range(way[0])]
        for process in ranks:
            process.start()
        sending.close()
        steps = _received(receiving, time.monotonic() + _SECONDS)
        for process in ranks:
            process.kill()
            process.join()
    return min(steps, default=None)


def _received(receiving: Connection, deadline: float) -> list[float]:
    steps: list[float] = []
    while len(steps) < _STEPS and receiving.poll(max(0.0, deadline - time.monotonic())):
        try:
            steps.append(receiving.recv())
        except EOFError:  # every rank has ended
            break
    return steps


def main(arguments: Sequence[str]) -> None:
    """Try all ways; see the module."""
    run_file, cores, launcher = arguments
    die_with_parent(int(launcher))
    config = load_run_config(Path(run_file))
    if pick_device(config.trainer.device).type != "cpu":
        return
    batch = random_batch(config, int(cores))
    for processes, threads in ways(int(cores)):
        seconds = step_seconds(config, batch, (processes, threads))
        print(json.dumps({"processes": processes, "threads": threads, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
