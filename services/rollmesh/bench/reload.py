"""``rollmesh bench reload``: time from publishing a policy to serving it, and the effect on running calls.

A real generator process, a real registry and a real checkpoint store, with 16 streams running throughout. For each
mode of ``generator.on_new_version``, policies are published one after the other:

* publish to serving: from the start of the write (weights, digests, manifest, fsync, announcement) until the registry
  shows that the generator serves the version, verified and checked on the canary;
* pause: the time without decoding, from the generator's histogram;
* stall: the seconds in which the trainer computes the canary and copies the weights, beside the copy alone, and beside
  the sum with writing and announcing, for which it would wait if publications did not run in the background;
* silence: the longest time without a token in any stream around the swap, with re-prefill and rejected calls.

Bytes per second are those of the reload (from detection to serving: read, hash, load, canary), with a plain copy of
the same files as the baseline.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from rollmesh.bench.measure import Measure, compared
from rollmesh.bench.models import SMALL, RandomModel
from rollmesh.bench.scene import STREAMS, open_scene

MODES = ("interrupt", "keep_kv", "drain")
_LARGE: dict[str, Any] = {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 1536, "vocab_size": 8192}


def run(*, quick: bool = False) -> list[Measure]:
    """Measure the demo's model (1 MB) in every mode and a model of 120 MB; ``quick``: two reloads, no large model."""
    torch.set_num_threads(1)
    reloads = 2 if quick else 5
    measures: list[Measure] = []
    for mode in MODES:
        measures += asyncio.run(_measure(SMALL, "1 MB", mode, reloads))
    if not quick:
        measures += asyncio.run(_measure(_LARGE, "120 MB", "interrupt", reloads))
    return measures


async def _measure(shape: dict[str, Any], size: str, mode: str, reloads: int) -> list[Measure]:
    with tempfile.TemporaryDirectory(prefix="rollmesh-bench-") as folder:
        model = RandomModel(shape=shape)
        async with open_scene(Path(folder), model, {"on_new_version": mode}) as scene, scene.streams():
            serving, pause, silence, load, published = await scene.reloads(reloads)
            copy_seconds = statistics.median(scene.copy_seconds() for _ in range(reloads))
            byte_count = sum(file.stat().st_size for file in scene.folder.iterdir())
        stalls = await asyncio.to_thread(model.stall_seconds, reloads)
        stall, copy = (statistics.median(column) for column in zip(*stalls, strict=True))
    title = f"{mode}, {size}"
    return [
        Measure(name=f"publish to serving, {title}", value=serving, unit="seconds"),
        Measure(name=f"pause of decoding, {title}", value=pause, unit="seconds"),
        Measure(name=f"longest silence of {STREAMS} streams, {title}", value=silence, unit="seconds"),
        compared(f"trainer's stall, {title}", stall, "seconds", "copy of the weights alone", copy),
        compared(
            f"trainer's stall beside waiting, {title}", stall, "seconds", "with write, announce", stall + published
        ),
        compared(f"reload, {title}", byte_count / load, "bytes/s", "plain file copy", byte_count / copy_seconds),
    ]
