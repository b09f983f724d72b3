"""An object store that is unreachable during a run: the trainer waits, and continues once it is back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollmesh.store import EmbeddedServer

from ...kit.ledger import read_ledger
from .trainer_run import opened_run, write_run_file

pytestmark = pytest.mark.slow


async def test_a_trainer_waits_for_its_checkpoint_store_wherever_it_is_unreachable(
    tmp_path: Path, tiny_model: Path, server: EmbeddedServer
) -> None:
    config = write_run_file(
        tmp_path / "run", tiny_model, server, trainer={"train_steps": 3}, checkpoints={"state_every_steps": 1}
    )
    async with opened_run(config) as run:

        async def announced() -> bool:
            return len(await run.store.policies.announced()) == 3

        async def rolled_back() -> bool:
            return await run.store.rollbacks.pending() is None

        run.start(script="unreachable_process")
        async with run.fed(2):
            await run.until("version 2", announced, pause=0.01)
            await run.store.rollbacks.request(1)
            await run.until("the end of the rollback", rolled_back, pause=0.01)
            await run.feed(1)
            await run.until_finished()
            run.start(script="unreachable_process")
            await run.until_finished()
        waits = [json.loads(line) for line in run.log().splitlines() if '"event": "unreachable"' in line]
        assert {wait["what"]: wait["message"].partition(":")[0] for wait in waits} == {
            "find_policy": "complete_policies",
            "read_batch": "stored_batch",
            "write_batch": "write_batch",
            "prune_policies": "prune",
            "prune_states": "prune_states",
            "list_batch_files": "batch_steps",
            "take_weights": "open",
            "load_state": "load_state",
            "open_session": "lineage",
            "remove_unfinished_batches": "remove_unfinished_batches",
        }
        assert [(r.policy_version, r.train_step) for r in await run.store.policies.announced()] == [
            (0, 0), (1, 1), (2, 2), (3, 2), (4, 3)
        ]  # fmt: skip
        ledger = read_ledger(run.checkpoints)
        assert (ledger.committed_step, ledger.damaged, ledger.trained_twice) == (3, {}, {})
