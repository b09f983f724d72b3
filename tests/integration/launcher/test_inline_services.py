"""Services as tasks of one process: their logs, their errors, their end; and the runs that cannot have them."""

import asyncio
import io
import json
from pathlib import Path
from typing import TextIO, cast

import pytest

from rollmesh.config import RunConfig, write_run_config
from rollmesh.config.services import TelemetryConfig
from rollmesh.errors import ConfigError
from rollmesh.launcher.inline_services import Serve, ServiceLogs, inline_start
from rollmesh.launcher.supervisor import ServiceSpec, Supervisor
from rollmesh.preflight.run_checks import check_inline
from rollmesh.runtime.lifecycle import Shutdown
from rollmesh.runtime.logging import configure_logging, get_logger

from .test_launcher_outages import config


@pytest.fixture(autouse=True)
def launcher_log() -> io.StringIO:
    log = io.StringIO()
    configure_logging(TelemetryConfig(), service="launcher", run="trial", stream=cast(TextIO, ServiceLogs(log)))
    return log


def supervise(folder: Path, serve: Serve, grace_seconds: float = 30.0) -> Supervisor:
    write_run_config(config(folder), folder / "config.yaml")
    supervisor = Supervisor(0, start=inline_start(folder / "config.yaml", {"rollout": serve}))
    supervisor.start(
        ServiceSpec(
            service="rollout",
            index=0,
            command=(),
            environment={"ROLLMESH_NETWORK__GRPC_PORT": "0"},
            log_file=folder / "logs/rollout-0.log",
            grace_seconds=grace_seconds,
        )
    )
    return supervisor


async def test_an_error_in_a_service_ends_the_run_with_its_traceback(tmp_path: Path, launcher_log: io.StringIO) -> None:
    async def serve(config: RunConfig, index: int, shutdown: Shutdown) -> None:
        get_logger("mine").info("began", port=config.network.grpc_port)
        raise ValueError("a mistake of the user")

    supervisor = supervise(tmp_path, serve)
    reason = await asyncio.wait_for(supervisor.failed, 60)
    assert "rollout-0 ended with status 1" in reason
    assert "ValueError: a mistake of the user" in reason
    assert "in serve" in reason
    began, crashed = map(json.loads, (tmp_path / "logs/rollout-0.log").read_text().splitlines())
    assert (began["event"], began["service"], began["port"]) == ("began", "rollout-0", 0)
    assert crashed["event"] == "service_crashed"
    assert "rollout-0" not in launcher_log.getvalue()
    await supervisor.kill_all()


async def test_a_service_reads_the_resolved_value_and_not_a_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLMESH_TRAINER__TRAIN_STEPS", "7")
    read: list[int] = []

    async def serve(config: RunConfig, index: int, shutdown: Shutdown) -> None:
        read.append(config.trainer.train_steps)
        await shutdown.wait()

    supervisor = supervise(tmp_path, serve)
    await asyncio.wait_for(supervisor.stop(["rollout"]), 60)
    assert read == [1]


async def test_an_error_of_the_run_file_is_the_reason_of_the_failure(tmp_path: Path) -> None:
    async def serve(config: RunConfig, index: int, shutdown: Shutdown) -> None:
        raise ConfigError("reward.verifier: no module 'mine'")

    supervisor = supervise(tmp_path, serve)
    reason = await asyncio.wait_for(supervisor.failed, 60)
    assert reason.startswith("rollout-0 cannot continue: ConfigError: reward.verifier: no module 'mine'")
    await supervisor.kill_all()


@pytest.mark.parametrize("obeys", [True, False])
async def test_a_service_drains_or_is_cancelled_after_its_grace(tmp_path: Path, obeys: bool) -> None:
    ends: list[str] = []
    began = asyncio.Event()

    async def serve(config: RunConfig, index: int, shutdown: Shutdown) -> None:
        began.set()
        try:
            await (shutdown if obeys else asyncio.Event()).wait()
            ends.append("drained")
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    supervisor = supervise(tmp_path, serve, grace_seconds=3600.0 if obeys else 0.05)
    await asyncio.wait_for(began.wait(), 60)
    await asyncio.wait_for(supervisor.stop(["rollout"]), 60)
    assert ends == ["drained" if obeys else "cancelled"]
    assert supervisor.pid("rollout-0") is None
    assert not supervisor.failed.done()


@pytest.mark.parametrize(
    ("section", "fields", "message"),
    [
        ("generator", {"replicas": 2}, "generator.replicas=2: .* add --set generator.replicas=1"),
        ("launcher", {"reward_replicas": 2}, "launcher.reward_replicas=2: --inline runs one reward"),
        ("launcher", {"rollout_replicas": 3}, "launcher.rollout_replicas=3: --inline runs one rollout"),
        ("launcher", {"agents_replicas": 2}, "launcher.agents_replicas=2: --inline runs one agents"),
        ("launcher", {"trainer_processes": 2}, "launcher.trainer_processes=2: --inline runs one trainer"),
        ("generator", {"engine": "sglang"}, "generator.engine=sglang: .*generator.engine=torch"),
    ],
)
def test_a_run_of_several_processes_is_refused(
    tmp_path: Path, section: str, fields: dict[str, object], message: str
) -> None:
    run = config(tmp_path)
    check_inline(run)
    with pytest.raises(ConfigError, match=message):
        check_inline(run.model_copy(update={section: getattr(run, section).model_copy(update=fields)}))
