"""Two ranks under torchrun: one claims and commits, both train, and the loss of one costs nothing but time."""

from __future__ import annotations

import json
from contextlib import suppress

import httpx
import numpy as np
import pytest
from safetensors.numpy import load
from torch.distributed import TCPStore

from rollmesh.runtime.addresses import free_port
from rollmesh.runtime.lifecycle import EXIT_UNFINISHED

from .test_kills import assert_every_batch_counts_once
from .trainer_run import START_SECONDS, Runs
from .two_ranks import TwoRanks

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
