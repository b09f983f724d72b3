"""Public figures of GPUs: memory, memory bandwidth and dense bf16 rate.

Sources are the vendors' data sheets; NVIDIA prints the rate with sparsity, which is twice the dense one given here.
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
    source: str
    certain: bool = True
    """False where the figure is no data sheet's: it was taken from several secondary sources that agree."""


def _gpu(name: str, gigabytes: float, terabytes_per_second: float, teraflops: float, source: str) -> Gpu:
    return Gpu(
        name=name,
        memory_bytes=gigabytes * 1e9,
        bytes_per_second=terabytes_per_second * 1e12,
        flops_per_second=teraflops * 1e12,
        source=source,
        certain="secondary" not in source,
    )


GPUS: Mapping[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        _gpu("A100", 80, 2.039, 312, "NVIDIA A100 80GB data sheet, SXM column"),
        _gpu("H100", 80, 3.35, 989.4, "NVIDIA H100 data sheet, SXM column: 1,979 TFLOPS with sparsity"),
        _gpu("H200", 141, 4.8, 989.4, "NVIDIA H200 data sheet, SXM column: 1,979 TFLOPS with sparsity"),
        _gpu("B200", 180, 8.0, 2250, "NVIDIA HGX B200 data sheet: 4.5 PFLOPS with sparsity per GPU"),
        _gpu("H800", 80, 3.35, 989.4, "secondary: H100 SXM with less NVLink and float64"),
        _gpu("H20", 96, 4.0, 148, "secondary: no public data sheet"),
        _gpu("L40S", 48, 0.864, 362, "NVIDIA L40S data sheet: 733 TFLOPS with sparsity"),
        _gpu("MI300X", 192, 5.3, 1307.4, "AMD Instinct MI300X data sheet"),
    )
}
"""GPUs by name, SXM modules where there are several forms."""


def find_gpu(name: str) -> Gpu:
    """Return a GPU of the table. Raises ConfigError with the known names."""
    found = GPUS.get(name.upper())
    if found is None:
        raise ConfigError(f"gpu={name}: not in the table; known are {', '.join(GPUS)}")
    return found
