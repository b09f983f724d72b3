"""Time from publishing a policy to serving it, and the effect on running calls.

A real generator process, a real registry and a real checkpoint store, with 16 streams running throughout. Policies of a
random model whose weights all change are published one after the other:

* publish to serving: from the copy of the weights, over canary, write with digests, manifest, fsync and announcement,
  until the registry shows that the generator serves the version, verified and checked on the canary. Its phases are
  shares of it; the generator verifies and stages at the same time;
* pause: the time for which the generator holds decoding, from its histogram;
* stall: the seconds in which the trainer copies the weights out, beside a copy of the same tensors by numpy, and beside
  the sum with all until the announcement, for which it would wait if publications did not run in the background;
* silence: the longest time without a token in any stream around the swap, with re-prefill and rejected calls.

Before each version the files of the one before are copied twice: once flushed to the disk, as a trainer writes, and
once as a generator reads.
"""

import asyncio
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError

from benchmarks.frame import Measure, Quick, at_least, at_most, compared
from benchmarks.models import PublishedModel, shape_of_size, write_random_model
from benchmarks.scene import STREAMS, Reload, open_scene
from rollmesh.checkpoints.durable import sync_tree
from rollmesh.errors import ConfigError

_PHASES = ("verify", "stage", "canary", "swap")


def run(
    *,
    quick: Quick = False,
    size: Annotated[str, typer.Option(help="Size of the model in float32, for example 1GiB.")] = "128MiB",
) -> list[Measure]:
    """Measure three versions; ``quick``: one. Raises ConfigError for a size that is none."""
    try:
        size_bytes = int(TypeAdapter(ByteSize).validate_python(size))
    except ValidationError as error:
        raise ConfigError(f"--size {size}: expected a size such as 64MiB or 1GiB") from error
    return asyncio.run(_measure(size, size_bytes, 1 if quick else 3))


async def _measure(size: str, size_bytes: int, reloads: int) -> list[Measure]:
    with tempfile.TemporaryDirectory(prefix="rollmesh-bench-") as name:
        folder = Path(name)
        write_random_model(folder / "model", shape_of_size(size_bytes))
        model = PublishedModel(folder / "model")
        results: list[Reload] = []
        copies: list[float] = []
        async with open_scene(folder, model, {}) as scene, scene.streams():
            before = await scene.metrics()
            for version in range(1, reloads + 1):
                copies.append(await asyncio.to_thread(_copy_seconds, scene.folder, folder))
                results.append(await scene.reload(version))
            after = await scene.metrics()
            peaks = {"trainer": _peak_bytes(os.getpid()), "generator": _peak_bytes(scene.process.pid)}
            byte_count = float(sum(file.stat().st_size for file in scene.folder.iterdir()))
    median, copy_seconds = Reload.median(results), statistics.median(copies)
    keys = {phase: f"reload_phase_seconds_sum {phase}" for phase in _PHASES}
    phases = {"trainer's canary": model.canary_seconds, "write and announce": median.published - model.canary_seconds}
    phases |= {phase: (after[key] - before[key]) / reloads for phase, key in keys.items()}
    stall, plain = model.copy_seconds
    waiting = stall + median.published
    rates, whole = (byte_count / median.serving, byte_count / copy_seconds), "publish to serving"
    bars = {"serving": (at_least("ratio", 0.6),), "pause": (at_most("ratio", 0.02),), "stall": (at_most("ratio", 1.2),)}
    return [
        compared(f"{whole}, {size}", rates[0], "bytes/s", "two plain file copies", rates[1], bars["serving"]),
        *(compared(f"{phase}, {size}", taken, "seconds", whole, median.serving) for phase, taken in phases.items()),
        compared(f"pause of decoding, {size}", median.pause, "seconds", whole, median.serving, bars["pause"]),
        Measure(name=f"longest silence of {STREAMS} streams, {size}", value=median.silence, unit="seconds"),
        compared(f"trainer's stall, {size}", stall, "seconds", "copy by numpy", plain, bars["stall"]),
        compared(f"trainer's stall beside waiting, {size}", stall, "seconds", "until the announcement", waiting),
        *(compared(f"peak memory of {who}, {size}", at, "bytes", "weights", byte_count) for who, at in peaks.items()),
    ]


def _copy_seconds(policy: Path, parent: Path) -> float:
    """Measure a copy of a policy's files, flushed to disk, and a copy of that copy, not flushed."""
    with tempfile.TemporaryDirectory(dir=parent) as name:
        target, started = Path(name), time.monotonic()
        shutil.copytree(policy, target / "0")
        sync_tree(target / "0")
        shutil.copytree(target / "0", target / "1")
        return time.monotonic() - started


def _peak_bytes(pid: int) -> float:
    """Return the largest resident memory of a process so far, mapped files included."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(1024.0 * int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
