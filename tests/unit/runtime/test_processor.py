"""The environment of computing processes."""

from __future__ import annotations

import pytest

from rollmesh.runtime.processor import compute_environment

_FLAGS = "fpu avx2 avx512f avx512cd avx512bw avx512dq avx512vl"


def _cpuinfo(vendor: str, flags: str) -> str:
    return f"processor\t: 0\nvendor_id\t: {vendor}\nflags\t\t: {flags}\n\nprocessor\t: 1\nflags\t\t: {flags}\n"


def test_every_library_gets_the_same_number_of_threads():
    assert compute_environment(3, {}, "") == {
        "OMP_NUM_THREADS": "3",
        "MKL_NUM_THREADS": "3",
        "OPENBLAS_NUM_THREADS": "3",
    }


@pytest.mark.parametrize(
    ("cpuinfo", "kernel"),
    [
        (_cpuinfo("AuthenticAMD", _FLAGS), "SkylakeX"),
        (_cpuinfo("AuthenticAMD", _FLAGS.replace(" avx512vl", "")), None),
        (_cpuinfo("GenuineIntel", _FLAGS), None),
    ],
)
def test_avx512_kernels_are_asked_for_only_where_the_processor_has_them_and_openblas_may_not_know(cpuinfo, kernel):
    assert compute_environment(1, {}, cpuinfo).get("OPENBLAS_CORETYPE") == kernel


def test_a_kernel_that_a_person_chose_is_kept():
    environment = compute_environment(1, {"OPENBLAS_CORETYPE": "Zen"}, _cpuinfo("AuthenticAMD", _FLAGS))
    assert environment["OPENBLAS_CORETYPE"] == "Zen"
