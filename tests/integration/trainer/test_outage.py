"""An object store that is unreachable during a run: the trainer waits, and continues once it is back."""

from __future__ import annotations

import json

import pytest

from ...kit.ledger import read_ledger
from .trainer_run import Runs

pytestmark = pytest.mark.slow


async def test_a_trainer_waits_for_its_checkpoint_store_wherever_it_is_unreachable(runs: Runs) -> None:
    async with runs(trainer={"train_steps": 3}, checkpoints={"state_every_steps": 1}) as run:

        async def announced() -> bool:
            return len(await run.store.policies.announced()) == 3

        run.start(fault="unreachable")
        async with run.fed(2):
            await run.until("version 2", announced, pause=0.01)
            await run.store.rollbacks.request(1)
            await run.until_rolled_back()
            await run.feed(1)
            await run.until_finished()
            run.start(fault="unreachable")
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
        assert await run.published() == [
            (0, 0), (1, 1), (2, 2), (3, 2), (4, 3)
        ]  # fmt: skip
        ledger = read_ledger(run.checkpoints)
        assert (ledger.committed_step, ledger.damaged, ledger.trained_twice) == (3, {}, {})
