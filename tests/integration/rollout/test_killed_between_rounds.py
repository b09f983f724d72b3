"""Real rollout processes, killed between two rounds: nothing is launched twice, and nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rollmesh.store import EmbeddedServer
from rollmesh.types import Trajectory

from .process_run import process_run

pytestmark = pytest.mark.slow

SIZE, MORE = 4, 4
"""Members of the first round, and of the second one of a group without a right answer."""


async def test_leaders_and_workers_that_are_killed_between_rounds_launch_nothing_twice_and_lose_nothing(
    tmp_path: Path, server: EmbeddedServer
) -> None:
    torch.set_num_threads(1)
    steps = 4
    sections = {
        "trainer": {"train_steps": steps, "algorithm": {"advantage": "dr_grpo"}},
        "curriculum": {"planner": "dars", "planner_options": {"most_members": SIZE + MORE}},
        "schedule": {"filter_zero_variance": False},
    }
    async with process_run(tmp_path / "rounds", server, **sections) as run:
        for service, index in (("generator", 0), ("reward", 0), ("rollout", 0)):
            run.start(service, index)
        number = 0

        async def extended() -> int:
            return (await run.store.mesh.counts()).totals.get("groups_extended_total", 0)

        async def replace_rollout() -> None:
            """Kill the process that leads and works, and start another one."""
            nonlocal number
            run.kill(f"rollout-{number}")
            number += 1
            run.start("rollout", number)

        async def kill_before_a_decision() -> None:
            async def waits() -> bool:
                view = await run.store.mesh.view()
                at_rest = view.unfinished + view.finished == 0
                return view.undecided_groups > 0 or at_rest or await extended() > before

            before = await extended()
            await run.until("a group that waits for a decision", waits)
            await replace_rollout()

        async def kill_in_a_second_round() -> None:
            async def has_begun() -> bool:
                view = await run.store.mesh.view()
                at_rest = view.unfinished + view.finished + view.undecided_groups == 0
                return at_rest or await extended() > before

            before = await extended()
            await run.until("a second round", has_begun)
            await replace_rollout()

        await run.train(1, kill_before_a_decision)
        await run.train(2, kill_in_a_second_round)
        await run.train(3, kill_before_a_decision)
        await run.train(4)

        async def ended() -> bool:
            view = await run.store.mesh.view()
            return view.is_complete and view.open_groups == view.ready_groups == view.leased == 0

        await run.until("the end of every group", ended)
        counts, drops = await run.store.mesh.counts(), await run.store.ledger.drops()
        groups = [group for batch in run.batches for group in batch.groups]
        prompts = [group.trajectories[0].prompt.prompt_id for group in groups]
        records = await run.store.prompt_records.read(prompts)
    assert len({group.group_id for group in groups}) == 2 * steps
    assert counts.totals["groups_extended_total"] > 0
    assert counts.totals["round_members_total"] <= MORE * counts.totals["groups_extended_total"]
    assert counts.totals.get("replacements_total", 0) == counts.dead_letters == 0
    assert counts.totals["admitted_total"] == 2 * steps + len(drops), "every group was trained or is in the ledger"
    assert {drop.reason for drop in drops} <= {"run_complete"}
    for group, prompt in zip(groups, prompts, strict=True):
        members = group.trajectories
        solved = sum(_is_solved(t) for t in members[:SIZE])
        second = {0: MORE, 1: 2}.get(solved, 0)
        assert [t.member_index for t in members] == list(range(SIZE + second)), "each member was launched once"
        assert (records[prompt].groups, records[prompt].members) == (1, len(members))
        assert records[prompt].token_sum == sum(t.response_token_count for t in members)
        assert records[prompt].reward_sum == pytest.approx(sum(t.shaped_reward for t in members), abs=1e-6)


def _is_solved(trajectory: Trajectory) -> bool:
    return trajectory.outcome is not None and trajectory.outcome.value > 0
