"""Real processes, killed: rollout workers, generators with the torch engine, a reward service."""

import json
import signal

import httpx
import numpy as np
import pytest
import torch

from rollmesh.launcher.timeline_recorder import GENERATED_TOKENS, metric_sums
from rollmesh.runtime.endpoints import read_endpoints
from rollmesh.types import OutcomeKind

from .process_run import process_run, uninterrupted

pytestmark = pytest.mark.slow


async def test_batches_survive_a_killed_generator_and_a_killed_worker_token_for_token(tmp_path, server):
    torch.set_num_threads(1)
    steps = 5
    sections = {"trainer": {"train_steps": steps}, "schedule": {"preset": "one_step_off"}}
    async with process_run(tmp_path / "killed", server, **sections) as run:
        for service, index in (("generator", 0), ("generator", 1), ("reward", 0), ("rollout", 0)):
            run.start(service, index)

        async def half_way():
            view, counts = await run.store.mesh.view(), await run.store.mesh.counts()
            return view.leased >= 2 and counts.totals["saved_tokens_total"] > saved + 24

        async def half_way_or_over():
            # A machine that stalls may see the rollouts of the next batch only once they have ended.
            return await half_way() or (await run.store.mesh.view()).ready_groups >= 2

        def kill_a_generator():
            run.kill("generator-0")

        def kill_the_worker():
            run.kill("rollout-0")
            run.start("rollout", 1)

        async def kill_half_way():
            nonlocal saved
            saved = (await run.store.mesh.counts()).totals["saved_tokens_total"]
            await run.until("rollouts half-way", half_way_or_over)
            if kills and await half_way():
                kills.pop(0)()

        saved, kills = 0, [kill_a_generator, kill_the_worker]
        for step in range(1, steps):
            await run.train(step, kill_half_way)
        await run.train(steps)
        assert not kills, "too few batches were met half-way"

        async def ended():
            view = await run.store.mesh.view()
            return view.is_complete and view.open_groups == view.ready_groups == view.leased == 0

        await run.until("the end of every group", ended)
        counts = await run.store.mesh.counts()
        assert set(counts.drops) <= {"run_complete"}
        assert counts.dead_letters == 0
        groups = [group for batch in run.batches for group in batch.groups]
        assert len({group.group_id for group in groups}) == 2 * steps
        trajectories = {t.trajectory_id: t for group in groups for t in group.trajectories}
        assert len(trajectories) == 8 * steps
        expected = await uninterrupted(run.config, {i: t.prompt for i, t in trajectories.items()})
    spans = set()
    for trajectory_id, trajectory in trajectories.items():
        chunks = expected[trajectory_id]
        assert trajectory.response_ids.tolist() == np.concatenate([c.token_ids for c in chunks]).tolist()
        logprobs = np.concatenate([s.behavior_logprobs for s in trajectory.segments])
        assert np.abs(logprobs - np.concatenate([c.behavior_logprobs for c in chunks])).max() < 1e-4
        assert trajectory.outcome.kind is OutcomeKind.SCORED
        assert list(trajectory.policy_versions) == sorted(trajectory.policy_versions)
        spans.add(len(trajectory.policy_versions))
    assert max(spans) > 1, "some trajectories were continued under a newer policy"


async def test_a_rollout_that_is_told_to_stop_leaves_nothing_leased_and_exits_with_0(tmp_path, server):
    # However late this process comes to stop the worker, some rollouts are under way.
    async with process_run(tmp_path / "drained", server, generator={"pace": [[1, 0.2]]}) as run:

        async def may_score():
            return bool(read_endpoints(run.folder, "reward"))

        run.start("reward")
        await run.until("the reward service, without which finished rollouts stay in the queue", may_score)
        run.start("generator")
        run.start("rollout")

        async def at_work():
            return (await run.store.mesh.counts()).totals.get("saved_tokens_total", 0) > 50

        await run.until("work", at_work)
        run.processes["rollout-0"].terminate()
        assert run.processes["rollout-0"].wait(timeout=120) == 0, run.logs()
        view = await run.store.mesh.view()
        assert view.leased == 0
        assert view.partial > 0
        # The drain waits for no reward: rollouts that were cut off after their last token are left to be scored.
        (drained,) = [json.loads(row) for row in run.log("rollout-0").splitlines() if '"event": "drained"' in row]
        assert view.finished <= drained["cut_off"]
        assert (await run.store.leadership.acquire("successor")) is not None


async def test_a_killed_worker_loses_at_most_partial_save_tokens_of_each_rollout(tmp_path, server):
    partial_save_tokens = 48
    sections = {
        "rollout": {"max_new_tokens": 128, "partial_save_tokens": partial_save_tokens},
        "schedule": {"groups_per_batch": 4, "group_size": 4, "pool_size": 16},
        # The worker loses nothing but what the kill costs it, however long the machine stalls before.
        "store": {"session_ttl_seconds": 60.0},
    }
    async with process_run(tmp_path / "hung", server, **sections) as run, httpx.AsyncClient(timeout=60.0) as http:
        for service in ("generator", "reward", "rollout"):
            run.start(service)

        async def saved_tokens():
            return (await run.store.mesh.counts()).totals.get("saved_tokens_total", 0)

        async def half_way():
            return (await run.store.mesh.view()).leased >= 12 and await saved_tokens() > 12 * 24

        async def generator():
            admin = read_endpoints(run.folder, "generator")[0].admin
            return metric_sums((await http.get(f"http://{admin}/metrics")).text)

        async def at_rest():
            return (await generator())["rollmesh_generator_running_calls"] == 0

        await run.until("rollouts half-way", half_way)
        # A worker that hangs first: the generators have all the time they want to run ahead of it.
        run.processes["rollout-0"].send_signal(signal.SIGSTOP)
        await run.until("the end of the calls", at_rest)
        run.kill("rollout-0")
        held = (await run.store.mesh.view()).leased
        regenerated = (await generator())[GENERATED_TOKENS] - await saved_tokens()
        assert held > 0
        assert 0 < regenerated <= partial_save_tokens * held
