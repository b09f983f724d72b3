"""Learning-rate schedules, weight decay, and gradients that must not be applied."""

import math

import pytest
import torch
from torch import nn

from rollmesh.config.trainer import OptimizationConfig
from rollmesh.trainer.learner.policy_state import (
    apply_update,
    build_optimizer,
    learning_rate,
    saved_moments,
    set_hyperparameters,
)


def rates(**fields: object) -> list[float]:
    config = OptimizationConfig(learning_rate=1.0, **fields)
    return [learning_rate(config, step, 10) for step in range(1, 11)]


def test_warm_up_is_linear_and_then_constant() -> None:
    assert rates(warmup_steps=4) == pytest.approx([0.25, 0.5, 0.75] + [1.0] * 7)


def test_linear_and_cosine_fall_from_the_peak_and_never_reach_zero_before_the_end() -> None:
    assert rates(warmup_steps=2, lr_schedule="linear") == pytest.approx([0.5, 1.0] + [1 - k / 8 for k in range(8)])
    cosine = rates(lr_schedule="cosine")
    assert cosine == pytest.approx([0.5 * (1 + math.cos(math.pi * k / 10)) for k in range(10)])
    assert cosine[-1] > 0


def test_weight_decay_shrinks_matrices_only() -> None:
    layer = nn.Linear(3, 2)
    before = [p.detach().clone() for p in (layer.weight, layer.bias)]
    optimizer = build_optimizer(layer, OptimizationConfig())
    for p in layer.parameters():
        p.grad = torch.zeros_like(p)
    set_hyperparameters(optimizer, rate=0.1, betas=(0.9, 0.95), weight_decay=0.5)
    apply_update(optimizer, 1.0)
    torch.testing.assert_close(layer.weight.detach(), before[0] * 0.95)
    assert torch.equal(layer.bias.detach(), before[1])


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_updates_nothing(poison: float) -> None:
    layer = nn.Linear(3, 2)
    before = [p.detach().clone() for p in layer.parameters()]
    optimizer = build_optimizer(layer, OptimizationConfig())
    for p in layer.parameters():
        p.grad = torch.full_like(p, poison)
    norm, updated = apply_update(optimizer, 1.0)
    assert not math.isfinite(norm) and not updated
    assert all(
        torch.equal(p.detach(), old) and p.grad is None for p, old in zip(layer.parameters(), before, strict=True)
    )
    assert all(float(state["step"]) == 0 for state in optimizer.state.values())


def test_gradients_are_clipped_to_their_norm_and_cleared() -> None:
    layer = nn.Linear(2, 1, bias=False)
    optimizer = build_optimizer(layer, OptimizationConfig())
    layer.weight.grad = torch.tensor([[3.0, 4.0]])
    norm, updated = apply_update(optimizer, 1.0)
    assert norm == pytest.approx(5.0) and updated and layer.weight.grad is None
    moment = optimizer.state[layer.weight]["exp_avg"]
    torch.testing.assert_close(moment, torch.tensor([[0.6, 0.8]]) * 0.1)


def trained(optimizer: str, steps: int, state: dict[str, torch.Tensor] | None = None) -> tuple[nn.Module, dict]:
    """Fit a layer to fixed targets for some steps, from a saved state if there is one; return it with its state."""
    noise = torch.Generator().manual_seed(5)
    layer = nn.Linear(64, 64, bias=False)
    inputs, targets = torch.randn(32, 64, generator=noise), torch.randn(32, 64, generator=noise)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(64, 64, generator=noise) / 8)
    built = build_optimizer(layer, OptimizationConfig(learning_rate=1e-2, optimizer=optimizer))
    live = {"weight": layer.weight.detach(), **saved_moments(built, layer.weight)}
    for name, value in (state or {}).items():
        live[name].copy_(value)
    for _ in range(steps):
        (layer(inputs) - targets).square().mean().backward()
        apply_update(built, 1.0)
    return layer, {name: value.clone() for name, value in live.items()}


def test_eight_bit_moments_take_a_quarter_of_the_memory_and_train_like_adamw() -> None:
    layer, state = trained("adamw_8bit", 40)
    reference, whole = trained("adamw", 40)
    moments = [
        sum(value.nbytes for name, value in of.items() if name not in ("weight", "step")) for of in (state, whole)
    ]
    assert moments[0] <= moments[1] * 0.26
    start = trained("adamw", 0)[0]
    moved = (reference.weight - start.weight).norm()
    assert (layer.weight - reference.weight).norm() < 0.05 * moved


def test_a_saved_state_of_eight_bit_moments_continues_to_the_same_bytes() -> None:
    _, uninterrupted = trained("adamw_8bit", 12)
    _, half = trained("adamw_8bit", 7)
    assert float(half["step"]) == 7 and set(half) == {"weight", "step", "state1", "state2", "absmax1", "absmax2"}
    _, continued = trained("adamw_8bit", 5, half)
    assert all(torch.equal(continued[name], value) for name, value in uninterrupted.items())


def test_moments_in_host_memory_change_no_bit_of_an_update() -> None:
    layer, state = trained("adamw_offload", 12)
    reference, expected = trained("adamw", 12)
    assert torch.equal(layer.weight, reference.weight)
    assert state.keys() == expected.keys() and all(torch.equal(state[name], value) for name, value in expected.items())
    _, half = trained("adamw_offload", 7)
    continued, _ = trained("adamw", 5, half)
    assert torch.equal(continued.weight, reference.weight)
