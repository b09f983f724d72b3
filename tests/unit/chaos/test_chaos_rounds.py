"""Every fault of the chaos bench has a run file that is valid, and is found by its name."""

from pathlib import Path

import pytest

from rollmesh.config.load import validate_run_config
from rollmesh.errors import ConfigError

from ...chaos.faults import FAULTS, Fault, Outside, faults_named
from ...chaos.short_run import short_run_config
from ...kit.agent_programs import write_page_run


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_round_has_a_valid_run_file(fault: Fault, tmp_path: Path) -> None:
    base = None if fault.outside is Outside.NOTHING else write_page_run(tmp_path, tmp_path / "model")
    data = short_run_config(Path("run"), 0, fault.preset, fault.settings, base)
    if fault.in_bucket:
        data["checkpoints"] |= {"folder": "s3://bucket/round"}
    config = validate_run_config(data, "round")
    assert fault.preset == "copris" or fault.name.endswith(f", {fault.preset}")
    assert (config.model.adapter is not None) is fault.name.endswith(", adapter")
    assert fault.in_bucket is fault.name.endswith(", deltas")
    assert bool(config.teachers) is fault.name.endswith(", taught")
    assert (config.checkpoints.anchor_every_versions > 1) is fault.in_bucket


def test_a_fault_is_picked_by_its_name_and_an_unknown_one_is_refused_with_all_names() -> None:
    assert [fault.name for fault in faults_named("kill -9 generator")] == ["kill -9 generator"]
    assert faults_named(None) == list(FAULTS)
    assert len({fault.name for fault in FAULTS}) == 45
    with pytest.raises(ConfigError, match="choose one of: .*kill -9 generator; .*flip a byte of the newest policy"):
        faults_named("kill -9 generators")
