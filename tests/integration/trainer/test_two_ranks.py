"""Two ranks: one claims and commits, both train, the loss of one costs time only; exit statuses say what helps."""

import json
import os
import re
import subprocess
from contextlib import suppress
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from safetensors.numpy import load
from safetensors.torch import load_file
from torch.distributed import TCPStore

from rollmesh.config import write_run_config
from rollmesh.launcher.run_folder import RunFolder
from rollmesh.launcher.service_specs import child_environment, service_spec
from rollmesh.runtime.addresses import free_port
from rollmesh.runtime.lifecycle import EXIT_CONFIG, EXIT_UNFINISHED

from ...kit.made_batches import write_random_model
from ...kit.run_files import write_run
from .rank_process import BUDGET, OTHER_BUDGET, first_moments, ranks_of, train
from .test_kills import assert_every_batch_counts_once
from .trainer_run import START_SECONDS, Runs, TrainerRun
from .two_ranks import TwoRanks, run_two_ranks

pytestmark = pytest.mark.slow

STEPS = 4


async def test_two_ranks_train_like_one_even_when_one_of_them_is_killed(runs: Runs) -> None:
    async with runs("alone") as run:
        await run.train(STEPS)
        expected = load(await run.last_weights())
    async with runs("ranks") as run:
        ranks = run.start(ranks=2, fresh=True)
        async with run.fed(STEPS):
            await run.until_version(2)
            _, follower = run.ranks()
            follower.kill()
            run.process = None
            assert ranks.wait(120) == 1, "a crash is worth another try"
            run.start(ranks=2)
            await run.until_finished(START_SECONDS)
        await assert_every_batch_counts_once(run, {})
        found = load(await run.last_weights())
    for name, weights in expected.items():
        assert np.abs(found[name] - weights).max() < 2e-4, name


async def test_two_ranks_leave_a_damaged_newest_state_for_the_one_before(runs: Runs) -> None:
    async with runs() as run:
        run.start(ranks=2)
        async with run.fed(3):
            await run.until_version(3)
            run.kill()
            newest, before = run.checkpoints.committed_states()
            shard = sorted(newest.folder.glob("*.safetensors"))[-1]
            data = shard.read_bytes()
            shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
            run.start(ranks=2)
            await run.feed(1)
            await run.until_finished(START_SECONDS)
        lines = [json.loads(line) for line in run.log().splitlines() if line.startswith("{")]
        seen = [(line["event"], line["folder"]) for line in lines if line["event"] in ("state_refused", "state_loaded")]
        assert seen == [("state_refused", newest.folder.name), ("state_loaded", before.folder.name)]
        assert [line["train_step"] for line in lines if line["event"] == "step_trained" and line["replayed"]] == [3]
        await assert_every_batch_counts_once(run, {})


async def test_no_rank_ends_with_the_status_of_a_complete_run_when_sigterm_stops_the_leading_one(runs: Runs) -> None:
    """On Kubernetes each pod of the trainer is an index of its Job, which never starts again after status 0."""
    async with runs() as run:
        ranks = run.start(ranks=2)
        assert isinstance(ranks, TwoRanks)
        async with run.fed(2):
            await run.until_version(2)
            ranks.leader.terminate()

            assert ranks.statuses(120) == [EXIT_UNFINISHED, EXIT_UNFINISHED], run.log()[-4000:]


async def test_a_rank_that_waits_for_the_others_or_loads_the_model_is_alive_and_not_ready(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a restart of the ranks in a pod, its startup probe has passed already."""
    port, store = free_port(), TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    alone_of_two = {
        "WORLD_SIZE": "2",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "ROLLMESH_NETWORK__ADMIN_PORT": str(port),
    }
    for name, value in alone_of_two.items():
        monkeypatch.setenv(name, value)
    async with runs() as run:
        run.start()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60.0) as client:

            async def alive() -> bool:
                with suppress(httpx.TransportError):
                    return (await client.get("/healthz")).status_code == 200
                return False

            await run.until("the liveness probe", alive, START_SECONDS, pause=0.05)
            assert (await client.get("/readyz")).status_code == 503


def start_ranks(run: TrainerRun) -> subprocess.Popen[bytes]:
    """Start two ranks by the launcher's command."""
    launcher = run.config.launcher.model_copy(update={"trainer_processes": 2, "torch_threads": 1})
    config = run.config.model_copy(update={"launcher": launcher})
    environment = child_environment(config, str(config.store.url))
    folder = RunFolder(run.folder)
    write_run_config(config, folder.config_file)
    spec = service_spec(config, folder, environment, "trainer", 0)
    with (run.folder / "trainer.log").open("ab") as log:
        run.process = subprocess.Popen(spec.command, stdout=log, stderr=log, env=os.environ | spec.environment)
    return run.process


async def test_a_setting_that_only_the_leading_rank_can_refuse_is_the_exit_status_of_all_ranks(runs: Runs) -> None:
    async with runs() as run:
        await run.store.training.open_session("another run of this name", lineage="of other checkpoints")

        ranks = start_ranks(run)

        assert ranks.wait(START_SECONDS) == EXIT_CONFIG, run.log()[-4000:]
        assert "choose another name" in run.log()


async def test_moments_that_cannot_be_split_are_refused_whoever_starts_the_ranks(runs: Runs) -> None:
    """On Kubernetes the number of ranks is not in the run file."""
    async with runs(trainer={"optimizer": "adamw_8bit"}) as run:
        ranks = run.start(ranks=2)

        assert ranks.wait(START_SECONDS) == EXIT_CONFIG, run.log()[-4000:]
        assert "trainer.optimizer=adamw_8bit with 2 trainer processes" in run.log()


async def test_a_rank_that_is_killed_leaves_a_status_that_is_worth_another_try(runs: Runs) -> None:
    async with runs() as run:
        ranks = start_ranks(run)
        await run.until("two ranks", lambda: len(run.ranks()) == 2, START_SECONDS, pause=0.01)

        run.ranks()[1].kill()

        assert ranks.wait(120) == 1, run.log()[-4000:]


def test_the_wait_for_an_order_outlasts_the_limit_of_collective_calls_and_ends_with_the_leader(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "waited")
    _, follower = run_two_ranks("wait", tmp_path)
    assert re.search(r"^training: .*[Tt]imed out", follower, re.MULTILINE), follower
    assert re.search(r"^order: late$", follower, re.MULTILINE), follower
    assert re.search(r"^leader: .*(closed|reset)", follower, re.MULTILINE), follower


def test_ranks_work_with_the_policies_that_rank_0_knew_when_it_sent_the_order(tmp_path: Path) -> None:
    leader, follower = (
        re.findall(r"^(?:accumulate|end_stage|train) .*$", printed, re.MULTILINE)
        for printed in run_two_ranks("announce", tmp_path / "checkpoints")
    )
    assert leader == follower and len(leader) == 6


@pytest.mark.parametrize(
    ("change", "groups_ahead"),
    [(f"trainer.tokens_per_microbatch={OTHER_BUDGET}", 0), ("trainer.learning_rate=0.02", 1)],
)
def test_a_rank_with_another_run_file_trains_the_step_of_rank_0(tmp_path: Path, change: str, groups_ahead: int) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    write_random_model(model)
    out.mkdir()
    run = {
        "model": {"path": str(model)},
        "data": {"max_prompt_tokens": 16},
        "rollout": {"max_new_tokens": 64},
        "generator": {"max_context_tokens": 128},
        "trainer": {"learning_rate": 0.01, "device": "cpu", "tokens_per_microbatch": BUDGET},
    }
    config = write_run(tmp_path / "run", run, {})
    run_two_ranks("read_other_settings", tmp_path / "run" / "run.yaml", out, change, str(groups_ahead))
    alone = ranks_of(config)
    whole = train(alone)
    report = json.loads((out / "report.json").read_text())
    assert report["groups_before_cut"] == groups_ahead
    assert report["loss"] == pytest.approx(whole.loss, rel=1e-6, abs=1e-6)
    assert report["grad_norm"] == pytest.approx(whole.grad_norm, rel=1e-6)
    # Not the weights: Adam divides a gradient near 0 by its size, rounding errors included.
    expected = torch.cat([moment.flatten() for _, moment in sorted(first_moments(alone.trainer).items())])
    found = torch.cat([moment.flatten() for _, moment in sorted(load_file(out / "moments.safetensors").items())])
    assert float((found - expected).norm()) <= 1e-6 * float(expected.norm())
