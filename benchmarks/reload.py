"""Time from publishing a policy to serving it, and the effect on running calls.

A real generator process, a real registry and a real checkpoint store, with 16 streams running throughout. For each
mode of ``generator.on_new_version``, policies are published one after the other:

* publish to serving: from the copy of the weights, over canary, write with digests, manifest, fsync and announcement,
  until the registry shows that the generator serves the version, verified and checked on the canary;
* pause: the time for which the generator holds decoding, from its histogram;
* stall: the seconds in which the trainer copies the weights out, beside a copy of the same tensors by numpy, and beside
  the sum with all until the announcement, for which it would wait if publications did not run in the background;
* silence: the longest time without a token in any stream around the swap, with re-prefill and rejected calls.

Bytes per second are those of the reload (from detection to serving: read, hash, load, canary), with a plain copy of
the same files as the baseline.

``--size`` measures one model of about that size instead, whose weights all change in every version. Before each version
its files are copied twice: once flushed to the disk, as a trainer writes, and once as a generator reads. The phases of
publish to serving are printed as shares of it; the generator verifies and stages at the same time.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from pydantic import ByteSize, TypeAdapter, ValidationError

from benchmarks.frame import Quick
from benchmarks.measure import Bar, Measure, at_least, at_most, compared
from benchmarks.models import SMALL, UpdatedModel
from benchmarks.scene import STREAMS, open_scene, peak_bytes
from rollmesh.errors import ConfigError

MODES = ("interrupt", "keep_kv", "drain")
_PHASES = ("verify", "stage", "canary", "swap")
_SIZE = TypeAdapter(ByteSize)
_LARGE: dict[str, Any] = {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 1536, "vocab_size": 8192}


def run(
    *,
    quick: Quick = False,
    size: Annotated[
        str | None, typer.Option(help="Measure one model of about this size instead, for example 1GiB.")
    ] = None,
) -> list[Measure]:
    """Measure the demo's model (1 MB) in every mode and a model of 120 MB; ``quick``: two reloads, no large model.

    ``size``, for example ``1GiB``: measure only a model of about that size. Raises ConfigError unless it is a size.
    """
    torch.set_num_threads(1)
    if size is not None:
        return asyncio.run(_measure_size(size, 1 if quick else 3))
    reloads = 2 if quick else 5
    measures: list[Measure] = []
    for mode in MODES:
        measures += asyncio.run(_measure(SMALL, "1 MB", mode, reloads))
    if not quick:
        measures += asyncio.run(_measure(_LARGE, "120 MB", "interrupt", reloads))
    return measures


async def _measure(shape: dict[str, Any], size: str, mode: str, reloads: int) -> list[Measure]:
    with tempfile.TemporaryDirectory(prefix="rollmesh-bench-") as folder:
        model = UpdatedModel(shape, Path(folder) / "model")
        async with open_scene(Path(folder), model, {"on_new_version": mode}) as scene, scene.streams():
            serving, pause, silence, load, published = await scene.reloads(reloads)
            copy_seconds = statistics.median(scene.copy_seconds() for _ in range(reloads))
            byte_count = float(sum(file.stat().st_size for file in scene.folder.iterdir()))
    title = f"{mode}, {size}"
    return [
        Measure(name=f"publish to serving, {title}", value=serving, unit="seconds"),
        Measure(name=f"pause of decoding, {title}", value=pause, unit="seconds"),
        Measure(name=f"longest silence of {STREAMS} streams, {title}", value=silence, unit="seconds"),
        *_stall(model, published, title),
        compared(f"reload, {title}", byte_count / load, "bytes/s", "plain file copy", byte_count / copy_seconds),
    ]


def _stall(model: UpdatedModel, published: float, title: str, bars: tuple[Bar, ...] = ()) -> list[Measure]:
    stall, plain = _medians(model.copies)
    whole = stall + published
    return [
        compared(f"trainer's stall, {title}", stall, "seconds", "copy by numpy", plain, bars),
        compared(f"trainer's stall beside waiting, {title}", stall, "seconds", "until the announcement", whole),
    ]


async def _measure_size(size: str, reloads: int) -> list[Measure]:
    try:
        size_bytes = int(_SIZE.validate_python(size))
    except ValidationError as error:
        raise ConfigError(f"--size {size}: expected a size such as 64MiB or 1GiB") from error
    with tempfile.TemporaryDirectory(prefix="rollmesh-bench-") as folder:
        model = UpdatedModel.of_size(size_bytes, Path(folder) / "model")
        results: list[tuple[float, ...]] = []
        parts: list[tuple[float, ...]] = []
        async with open_scene(Path(folder), model, {}) as scene, scene.streams():
            for version in range(1, reloads + 1):
                copies = await asyncio.to_thread(scene.two_copies_seconds)
                before = await scene.phase_seconds()
                measured = await scene.reload(version)
                results.append((copies, *measured))
                after = await scene.phase_seconds()
                parts.append(tuple(after[phase] - before[phase] for phase in _PHASES))
            peaks = {"trainer": peak_bytes(os.getpid()), "generator": peak_bytes(scene.process.pid)}
            byte_count = float(sum(file.stat().st_size for file in scene.folder.iterdir()))
    copies, serving, pause, silence, _, published = _medians(results)
    canary = statistics.median(model.canaries)
    two_copies, whole = "two plain file copies", "publish to serving"
    rates = byte_count / serving, byte_count / copies
    phases = {"trainer's canary": canary, "write and announce": published - canary}
    phases |= dict(zip(_PHASES, _medians(parts), strict=True))
    return [
        compared(f"publish to serving, {size}", rates[0], "bytes/s", two_copies, rates[1], (at_least("ratio", 0.6),)),
        *(compared(f"{name}, {size}", seconds, "seconds", whole, serving) for name, seconds in phases.items()),
        compared(f"pause of decoding, {size}", pause, "seconds", whole, serving, (at_most("ratio", 0.02),)),
        Measure(name=f"longest silence of {STREAMS} streams, {size}", value=silence, unit="seconds"),
        *_stall(model, published, size, (at_most("ratio", 1.2),)),
        *(
            compared(f"peak memory of {who}, {size}", peak, "bytes", "weights", byte_count)
            for who, peak in peaks.items()
        ),
    ]


def _medians(rows: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(statistics.median(column) for column in zip(*rows, strict=True))
