from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from rollmesh.errors import ConfigError
from rollmesh.scheduling.presets import PRESETS
from rollmesh.sim.gpus import find_gpu
from rollmesh.sim.model_sizes import find_model
from rollmesh.sim.published import ASSUMPTIONS, PUBLISHED, PublishedSpeedUp, leave_one_out, log_error
from rollmesh.sim.roofline import Roofline


def rows(system: str) -> Iterator[PublishedSpeedUp]:
    return (row for row in PUBLISHED if row.system == system)


def test_the_figures_are_those_of_the_papers() -> None:
    found = {system: [round(row.speed_up, 2) for row in rows(system)] for system in {row.system for row in PUBLISHED}}
    assert found == {
        # CoPRIS prints 1.58, 1.94 and 1.75; 54.42 / 31.16 is 1.746.
        "CoPRIS": [1.58, 1.94, 1.75],
        "AReaL": [2.27, 2.77],
        "APRIL": [1.17, 1.21, 1.35, 1.26, 1.35, 1.44],
        "RollPacker": [1.30, 1.48, 2.21],
        "StreamRL": [1.55],
        "RollArt": [2.05, 1.35, 1.31],
        "verl fully async": [1.30, 1.49, 1.49],
    }


def test_rows_name_presets_models_gpus_and_sources_that_exist() -> None:
    for row in PUBLISHED:
        assert {row.preset, row.baseline_preset} <= set(PRESETS), row
        assert row.source and row.evidence, row
        assert find_gpu(row.gpu or ASSUMPTIONS.gpu), row
        if row.model is not None:
            assert find_model(row.model), row


def test_unknown_setups_are_named_and_never_guessed() -> None:
    incomplete = {row.system: row.missing for row in PUBLISHED if row.missing}
    assert set(incomplete) == {"StreamRL", "RollArt", "verl fully async"}
    assert incomplete["RollArt"] == ("model", "generator_gpus", "trainer_gpus")
    assert incomplete["verl fully async"] == ("groups_per_batch", "group_size", "response_tokens")


def test_every_known_setup_fits_its_gpus() -> None:
    for row in PUBLISHED:
        if row.missing or row.model is None or row.response_tokens is None:
            continue
        model, gpu = find_model(row.model), find_gpu(row.gpu or ASSUMPTIONS.gpu)
        devices = 1 if model.hidden_size < 5120 else 4
        generator = Roofline(gpu=gpu, model=model, tensor_parallel=devices, efficiencies=ASSUMPTIONS.efficiencies)
        assert generator.cache_tokens(ASSUMPTIONS.prompt_tokens + row.response_tokens) > 0


def test_leave_one_out_predicts_the_geometric_mean_of_the_others() -> None:
    assert leave_one_out([1.0, 2.0, 8.0]) == pytest.approx([4.0, math.sqrt(8.0), math.sqrt(2.0)])
    with pytest.raises(ConfigError, match="1 rows"):
        leave_one_out([2.0])


def test_the_error_is_symmetric_in_too_fast_and_too_slow() -> None:
    assert log_error([2.0, 4.0], [4.0, 2.0]) == pytest.approx(math.log(2))
    assert log_error([1.5], [1.5]) == 0.0
