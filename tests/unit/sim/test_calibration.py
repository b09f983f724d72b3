"""Models fitted to records whose true numbers are known."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from rollmesh.sim.calibration import core_shares, engine_costs, trainer_model, unexplained_seconds, updates_per_second
from rollmesh.sim.cores import CoreShares, fair_level
from rollmesh.sim.run_records import RecordedWork, RunRecords, TrainedUpdate
from rollmesh.sim.simulated_mesh import MeshSettings, SimulatedMesh
from rollmesh.sim.simulated_trainer import update_record

from .meshes import mesh_settings

PROMPTS = 100
"""Tokens of the prompts of a batch."""


def work(steps: float, tokens: float, prefill: float, *, noise: float = 0.0) -> RecordedWork:
    """2 ms a step, 0.1 ms a token, 0.05 ms a token of a prefill."""
    seconds = 0.002 * steps + 0.0001 * tokens + 0.00005 * prefill + noise
    return RecordedWork(steps=steps, tokens=tokens, prefill_tokens=prefill, busy_seconds=seconds)


def update(cut_at: float, *, tokens: int = 1000, gradient: float = 2.0) -> TrainedUpdate:
    """A step that ends half a second after its gradient; its policy is copied in 0.1 s and announced 0.15 s later."""
    trained = cut_at + gradient + 0.5
    return TrainedUpdate(
        tokens=tokens,
        forward_tokens=tokens + PROMPTS,
        cut_at=cut_at,
        gradient_seconds=gradient,
        trained_at=trained,
        copied_at=trained + 0.1,
        announced_at=trained + 0.25,
    )


RECORDS = RunRecords(
    folder=Path("run"),
    updates=(update(0.0), update(12.75), update(25.5)),
    work=(work(400, 20_000, 1000), work(400, 4000, 0)),
    generators=2,
    generator_cpu_seconds=1.3,
    service_cpu_seconds=4.0,
    reward_seconds=0.1,
    fetch_seconds=0.02,
    swap_seconds=0.01,
)


def test_the_costs_of_steps_tokens_and_prefills_are_told_apart() -> None:
    costs = engine_costs([work(100, 6400, 500), work(100, 3000, 0), work(100, 200, 0), work(0, 0, 0)], slots=64)
    assert costs.step(1, 300) == pytest.approx(0.0021)
    assert costs.step(64, 9999) == pytest.approx(0.0084)
    assert costs.prefill_seconds_per_token == pytest.approx(0.00005)


def test_the_fitted_seconds_add_up_to_the_measured_ones_and_none_is_negative() -> None:
    """More tokens took less time here, so only steps have a cost: 1.2 s over 200 steps."""
    busy = [
        RecordedWork(steps=100, tokens=5000, prefill_tokens=300, busy_seconds=0.4),
        RecordedWork(steps=100, tokens=100, prefill_tokens=0, busy_seconds=0.8),
    ]
    costs = engine_costs(busy, slots=4)
    assert costs.base[1:] == pytest.approx((0.006,) * 4)
    assert costs.prefill_seconds_per_token == 0.0


def test_steps_of_many_calls_are_not_charged_to_the_prefills_that_come_with_them() -> None:
    """Least squares alone would charge 1 ms for a token of a prefill and nothing for a sampled one."""
    busy = [
        RecordedWork(steps=100, tokens=6400, prefill_tokens=640, busy_seconds=0.84),
        RecordedWork(steps=100, tokens=3000, prefill_tokens=0, busy_seconds=0.2),
        RecordedWork(steps=100, tokens=200, prefill_tokens=0, busy_seconds=0.2),
    ]
    costs = engine_costs(busy, slots=64)
    per_token = costs.base[64] - costs.base[63]
    assert per_token > 0
    assert costs.prefill_seconds_per_token == pytest.approx(per_token)
    assert 300 * costs.base[0] + per_token * (9600 + 640) == pytest.approx(1.24)


def test_the_gradient_goes_by_tokens_and_the_rest_is_fixed() -> None:
    """4.4 s for 600 and 1600 tokens with prompts: 2 ms each, 0.2 s of a step for the prompts."""
    updates = [update(0.0, tokens=500, gradient=1.4), update(10.0, tokens=1500, gradient=3.0)]
    model = trainer_model(updates, evidence_passes=1)
    assert model.seconds_per_token == pytest.approx(0.002)
    assert model.fixed_seconds == pytest.approx(0.5 + 0.2)
    assert (model.publish_seconds(), model.background_seconds) == pytest.approx((0.25, 0.15))
    assert model.train_seconds(tokens=300) == pytest.approx(0.7 + 0.6 + 0.2)  # and a third for the evidence


@pytest.mark.parametrize(("cuts", "lacking"), [((0.0, 9.0, 18.0), 3.75), ((0.0, 14.0, 28.0), 0.0)])
def test_the_time_from_a_policy_to_the_next_cut_that_no_model_has(cuts: tuple[float, ...], lacking: float) -> None:
    """Measured: 10 s. Simulated: a step takes 2.5 s and its publication 0.25, so 6.25 or 11.25 s remain."""
    simulated = [update_record(1, [], [0], cut_at=cut, trained_at=cut + 2.5, trainer_wait_seconds=0.0) for cut in cuts]
    assert unexplained_seconds(RECORDS.updates, simulated, 0.25) == pytest.approx(lacking)


def test_generators_decode_between_the_steps() -> None:
    """The generators decode for 10 s after each of the two first steps, in which the services take 4 s."""
    shares = core_shares(RECORDS, cores=2, is_shared=True, is_paced=True)
    assert shares.service_demand == pytest.approx(0.2)
    assert shares.generator_demand == pytest.approx(1.3 / (0.8 + 2.0 + 0.05 + 0.8 + 0.4))
    assert shares.generators == 2


def test_the_rate_of_a_run_leaves_its_start_out() -> None:
    assert RECORDS.updates_per_second == pytest.approx(2 / 25.5)
    late = replace(RECORDS, updates=(update(0.0), update(5.0)))
    assert late.updates_per_second == pytest.approx(1 / 5)


TOGETHER = CoreShares(cores=2, is_shared=True, generators=2, generator_demand=1.0, service_demand=0.0)
APART = replace(TOGETHER, is_shared=False)


@pytest.mark.parametrize(
    ("cores", "demands", "level"),
    [
        (2.0, [(3, 1.0)], 2 / 3),
        (2.0, [(2, 1.0)], math.inf),  # exactly full: every process gets what it wants
        (2.0, [(1, 0.5), (2, 1.0)], 0.75),  # 0.5 of the cores are gone, 1.5 remain for two
        (1.0, [(2, 0.8), (1, 0.1)], 0.45),
        (1.0, [], math.inf),
    ],
)
def test_what_small_demands_leave_is_divided_evenly(
    cores: float, demands: list[tuple[float, float]], level: float
) -> None:
    assert fair_level(cores, demands) == pytest.approx(level)


SLOWINGS = {
    "three busy processes on two cores": (TOGETHER, (2, True, 1.5), (2, 1.5)),
    "a generator and a trainer have a core each": (TOGETHER, (1, True, 1.0), (1, 1.0)),
    "taking turns slows nothing": (TOGETHER, (2, False, 1.0), (0, 1.0)),
    # Two generators take 0.8, and the services 0.6: 0.6 of the two cores are left for the trainer.
    "who sleeps keeps its pace": (
        replace(TOGETHER, generator_demand=0.4, service_demand=0.6),
        (2, True, 1.0),
        (2, 1 / 0.6),
    ),
    # Two generators share their core with each other, training or not; services of 0.25 leave 0.75 of the other.
    "cores of their own": (replace(APART, service_demand=0.25), (2, True, 1.0), (2, 1 / 0.75)),
    "one generator on its half": (APART, (1, True, 0.5), (0, 1.0)),
}
"""Cores; (decoding, training) and the slowing of generators; decoding and the slowing of the trainer."""


@pytest.mark.parametrize("case", SLOWINGS)
def test_who_gets_less_of_the_cores_takes_longer(case: str) -> None:
    cores, (decoding, is_training, of_generators), (decoding_beside, of_trainer) = SLOWINGS[case]
    assert cores.generator_slowing(decoding=decoding, is_training=is_training) == pytest.approx(of_generators)
    assert cores.trainer_slowing(decoding=decoding_beside) == pytest.approx(of_trainer)


SHARED = CoreShares(cores=4, is_shared=True, generators=4, generator_demand=1.0, service_demand=0.0)
"""Four generators have a core each, until the trainer takes one more."""


def on(cores: CoreShares | None, preset: str) -> MeshSettings:
    return replace(mesh_settings(preset), cores=cores)


def seconds(settings: MeshSettings) -> float:
    return SimulatedMesh(settings).run().seconds


def test_a_schedule_that_takes_turns_is_as_fast_on_shared_cores() -> None:
    assert seconds(on(SHARED, "sync")) == pytest.approx(seconds(on(None, "sync")), rel=1e-9)


def test_work_that_overlaps_is_slower_on_shared_cores_and_never_slower_than_turns() -> None:
    free, shared, turns = (
        updates_per_second(on(cores, preset))
        for cores, preset in ((None, "one_step_off"), (SHARED, "one_step_off"), (None, "sync"))
    )
    assert turns < shared < free


@pytest.mark.parametrize("preset", ["copris", "pipeline", "areal", "rollpacker"])
def test_every_promise_of_the_scheduler_holds_on_shared_cores(preset: str) -> None:
    assert len(SimulatedMesh(on(SHARED, preset), check=True).run().updates) == 6
