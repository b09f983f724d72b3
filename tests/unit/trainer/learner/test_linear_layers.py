"""Linear layers by oneDNN: results and gradients are those of float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from rollmesh.trainer.learner.linear_layers import use_onednn

pytestmark = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="the processor has no AVX-512"
)


@pytest.mark.parametrize("rows", [7, 512, 1301])
@pytest.mark.parametrize(("width", "out", "bias"), [(96, 32, True), (96, 192, False), (192, 96, True)])
def test_results_and_gradients_are_those_of_float64(rows: int, width: int, out: int, bias: bool) -> None:
    torch.manual_seed(rows + out)
    exact = nn.Sequential(nn.Linear(width, out, bias=bias)).double()
    layer = copy.deepcopy(exact).float()
    use_onednn(layer)
    assert type(layer[0]) is not nn.Linear
    inputs = torch.randn(1, rows, width)
    found, wanted = inputs.clone().requires_grad_(), inputs.double().requires_grad_()
    weights = torch.randn(1, rows, out)
    results = layer(found), exact(wanted)
    (results[0] * weights).sum().backward()
    (results[1] * weights.double()).sum().backward()
    gradients = [(found.grad, wanted.grad)]
    gradients += [(ours.grad, theirs.grad) for ours, theirs in zip(layer.parameters(), exact.parameters(), strict=True)]
    for ours, theirs in [results, *gradients]:
        assert ours is not None and theirs is not None
        assert (ours - theirs).abs().max() < 2e-6 * theirs.abs().max()
