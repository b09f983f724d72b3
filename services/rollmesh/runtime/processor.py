"""Environment of processes that compute on the CPU: it has to be there before numpy and torch are loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

_SKYLAKEX_FLAGS = frozenset({"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"})


def compute_environment(
    threads: int, environ: Mapping[str, str] | None = None, cpuinfo: str | None = None
) -> dict[str, str]:
    """Variables for a process with ``threads`` compute threads; what ``environ`` says already is kept.

    numpy's OpenBLAS knows AMD processors by model and falls back to AVX2 on newer ones. Where the processor has what
    the Skylake-X kernels need, they are asked for by name: matrix products take half the time. ``cpuinfo`` is the
    text of /proc/cpuinfo.
    """
    given = os.environ if environ is None else environ
    wanted = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    text = _read_cpuinfo() if cpuinfo is None else cpuinfo
    if "AuthenticAMD" in text and _flags(text) >= _SKYLAKEX_FLAGS:
        wanted["OPENBLAS_CORETYPE"] = given.get("OPENBLAS_CORETYPE", "SkylakeX")
    return wanted


def _flags(cpuinfo: str) -> frozenset[str]:
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return frozenset(value.split())
    return frozenset()


def _read_cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ""
