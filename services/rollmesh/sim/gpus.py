"""Figures of GPUs: memory, memory bandwidth and dense bf16 rate.

From memory of the vendors' published figures; no data sheet was read for this table. Check a GPU before you rely on its
figure. NVIDIA prints the rate with sparsity, which is twice the dense one given here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rollmesh.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One device."""

    name: str
    memory_bytes: float
    bytes_per_second: float
    """Peak bandwidth of the device's memory."""
    flops_per_second: float
    """Peak dense bf16 rate of the matrix units."""
    form: str
    """Form that the figures belong to."""


def _gpu(name: str, gigabytes: float, terabytes_per_second: float, teraflops: float, form: str) -> Gpu:
    return Gpu(
        name=name,
        memory_bytes=gigabytes * 1e9,
        bytes_per_second=terabytes_per_second * 1e12,
        flops_per_second=teraflops * 1e12,
        form=form,
    )


GPUS: Mapping[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        _gpu("A100", 80, 2.039, 312, "SXM, 80 GB"),
        _gpu("H100", 80, 3.35, 989.4, "SXM"),
        _gpu("H200", 141, 4.8, 989.4, "SXM"),
        _gpu("B200", 180, 8.0, 2250, "one of the eight of an HGX board"),
        _gpu("H800", 80, 3.35, 989.4, "H100 SXM with less NVLink and float64"),
        _gpu("H20", 96, 4.0, 148, "SXM"),
        _gpu("L40S", 48, 0.864, 362, "PCIe"),
        _gpu("MI300X", 192, 5.3, 1307.4, "OAM"),
    )
}
"""GPUs by name."""


def find_gpu(name: str) -> Gpu:
    """Return a GPU of the table. Raises ConfigError with the known names."""
    found = GPUS.get(name.upper())
    if found is None:
        raise ConfigError(f"gpu={name}: not in the table; known are {', '.join(GPUS)}")
    return found
