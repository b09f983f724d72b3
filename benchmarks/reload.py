"""Time from publishing a policy to serving it, and the effect on running calls.

A real generator process, a real registry and a real checkpoint store, with 16 streams running throughout. For each
mode of ``generator.on_new_version``, policies whose weights all change are published one after the other:

* publish to serving: from the copy of the weights, over canary, write with digests, manifest, fsync and announcement,
  until the registry shows that the generator serves the version, verified and checked on the canary;
* pause: the time for which the generator holds decoding, from its histogram;
* stall: the seconds in which the trainer copies the weights out, beside a copy of the same tensors by numpy, and beside
  the sum with all until the announcement, for which it would wait if publications did not run in the background;
* silence: the longest time without a token in any stream around the swap, with re-prefill and rejected calls.

Bytes per second are those of the reload (from detection to serving: read, hash, load, canary), beside a plain copy of
the same files.

``--size`` measures one model of about that size instead. Before each version the files of the one before are copied
twice: once flushed to the disk, as a trainer writes, and once as a generator reads. The phases of publish to serving
are shares of it; the generator verifies and stages at the same time.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError

from benchmarks.frame import Bar, Measure, Quick, at_least, at_most, compared
from benchmarks.models import SMALL, PublishedModel, shape_of_size, write_random_model
from benchmarks.scene import STREAMS, Reload, open_scene
from rollmesh.checkpoints.durable import sync_tree
from rollmesh.errors import ConfigError

MODES = ("interrupt", "keep_kv", "drain")
_PHASES = ("verify", "stage", "canary", "swap")
_LARGE: dict[str, Any] = {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 1536, "vocab_size": 8192}


def run(
    *,
    quick: Quick = False,
    size: Annotated[
        str | None, typer.Option(help="Measure one model of about this size instead, for example 1GiB.")
    ] = None,
) -> list[Measure]:
    """Measure the demo's model (1 MB) in every mode and a model of 120 MB; ``quick``: two reloads, no large model."""
    if size is not None:
        return asyncio.run(_measure_size(size, 1 if quick else 3))
    reloads = 2 if quick else 5
    measures = [m for mode in MODES for m in asyncio.run(_measure(SMALL, "1 MB", mode, reloads))]
    return measures if quick else measures + asyncio.run(_measure(_LARGE, "120 MB", "interrupt", reloads))


async def _measure(shape: Mapping[str, Any], size: str, mode: str, reloads: int) -> list[Measure]:
    with tempfile.TemporaryDirectory(prefix="rollmesh-bench-") as name:
        folder = Path(name)
        model = _random_model(folder, shape)
        async with open_scene(folder, model, {"on_new_version": mode}) as scene, scene.streams():
            median = Reload.median([await scene.reload(version) for version in range(1, reloads + 1)])
            copy_seconds = statistics.median(_copy_seconds(scene.folder, folder) for _ in range(reloads))
            byte_count = _byte_count(scene.folder)
    title = f"{mode}, {size}"
    return [
        Measure(name=f"publish to serving, {title}", value=median.serving, unit="seconds"),
        Measure(name=f"pause of decoding, {title}", value=median.pause, unit="seconds"),
        Measure(name=f"longest silence of {STREAMS} streams, {title}", value=median.silence, unit="seconds"),
        *_stall(model, median.published, title),
        compared(f"reload, {title}", byte_count / median.load, "bytes/s", "plain file copy", byte_count / copy_seconds),
    ]


async def _measure_size(size: str, reloads: int) -> list[Measure]:
    try:
        size_bytes = int(TypeAdapter(ByteSize).validate_python(size))
    except ValidationError as error:
        raise ConfigError(f"--size {size}: expected a size such as 64MiB or 1GiB") from error
    with tempfile.TemporaryDirectory(prefix="rollmesh-bench-") as name:
        folder = Path(name)
        model = _random_model(folder, shape_of_size(size_bytes))
        results: list[Reload] = []
        copies: list[float] = []
        async with open_scene(folder, model, {}) as scene, scene.streams():
            before = await scene.metrics()
            for version in range(1, reloads + 1):
                copies.append(await asyncio.to_thread(_copy_seconds, scene.folder, folder, times=2))
                results.append(await scene.reload(version))
            after = await scene.metrics()
            peaks = {"trainer": _peak_bytes(os.getpid()), "generator": _peak_bytes(scene.process.pid)}
            byte_count = _byte_count(scene.folder)
    median, copy_seconds = Reload.median(results), statistics.median(copies)
    keys = {phase: f"reload_phase_seconds_sum {phase}" for phase in _PHASES}
    phases = {"trainer's canary": model.canary_seconds, "write and announce": median.published - model.canary_seconds}
    phases |= {phase: (after[key] - before[key]) / reloads for phase, key in keys.items()}
    rates, whole = (byte_count / median.serving, byte_count / copy_seconds), "publish to serving"
    bars = {"serving": (at_least("ratio", 0.6),), "pause": (at_most("ratio", 0.02),), "stall": (at_most("ratio", 1.2),)}
    return [
        compared(f"{whole}, {size}", rates[0], "bytes/s", "two plain file copies", rates[1], bars["serving"]),
        *(compared(f"{phase}, {size}", taken, "seconds", whole, median.serving) for phase, taken in phases.items()),
        compared(f"pause of decoding, {size}", median.pause, "seconds", whole, median.serving, bars["pause"]),
        Measure(name=f"longest silence of {STREAMS} streams, {size}", value=median.silence, unit="seconds"),
        *_stall(model, median.published, size, bars["stall"]),
        *(compared(f"peak memory of {who}, {size}", at, "bytes", "weights", byte_count) for who, at in peaks.items()),
    ]


def _random_model(folder: Path, shape: Mapping[str, Any]) -> PublishedModel:
    write_random_model(folder / "model", shape)
    return PublishedModel(folder / "model")


def _stall(model: PublishedModel, published: float, title: str, bars: tuple[Bar, ...] = ()) -> list[Measure]:
    stall, plain = model.copy_seconds
    whole = stall + published
    return [
        compared(f"trainer's stall, {title}", stall, "seconds", "copy by numpy", plain, bars),
        compared(f"trainer's stall beside waiting, {title}", stall, "seconds", "until the announcement", whole),
    ]


def _copy_seconds(policy: Path, parent: Path, times: int = 1) -> float:
    """Measure a copy of a policy's files, flushed to disk, and copies of that copy, not flushed."""
    with tempfile.TemporaryDirectory(dir=parent) as name:
        target, started = Path(name), time.monotonic()
        shutil.copytree(policy, target / "0")
        sync_tree(target / "0")
        for number in range(1, times):
            shutil.copytree(target / "0", target / f"{number}")
        return time.monotonic() - started


def _byte_count(folder: Path) -> float:
    return float(sum(file.stat().st_size for file in folder.iterdir()))


def _peak_bytes(pid: int) -> float:
    """Return the largest resident memory of a process so far, mapped files included."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(1024.0 * int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
