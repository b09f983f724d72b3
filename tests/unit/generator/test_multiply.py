"""Choice of the engine's matrix product."""

from __future__ import annotations

import pytest
import torch

from rollmesh.generator.engines.torch.kernels import NumpyMultiply, TorchMultiply, fastest_multiply


def test_numpy_is_no_candidate_where_its_threads_differ_from_torch_s(monkeypatch):
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "7")
    assert isinstance(fastest_multiply(torch.ones(32, 64), 16), TorchMultiply)
    monkeypatch.delenv("OPENBLAS_NUM_THREADS")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert isinstance(fastest_multiply(torch.ones(32, 64), 16), TorchMultiply)


def test_numpy_is_no_candidate_for_bfloat16(monkeypatch):
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    assert isinstance(fastest_multiply(torch.ones(32, 64, dtype=torch.bfloat16), 16), TorchMultiply)


@pytest.mark.parametrize("multiply", [TorchMultiply(), NumpyMultiply()])
def test_products_are_written_into_the_memory_of_the_output_tensor(multiply):
    a, b = torch.randn(5, 3, 4), torch.randn(5, 7, 4).transpose(1, 2)
    batched, single = torch.empty(5, 3, 7), torch.empty(3, 7)
    op = multiply.operand
    multiply(op(a), op(b), op(batched))
    multiply(op(a[0]), op(b[0]), op(single))
    torch.testing.assert_close(batched, a @ b)
    torch.testing.assert_close(single, a[0] @ b[0])
