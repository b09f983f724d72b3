"""The paper's old logprobs: unfinished trajectories are scored at the end of each stage, before the weights change."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from rollmesh.mesh import Cursor, Desired
from rollmesh.store import Append, EmbeddedServer, Finish, NewGroup, Score
from rollmesh.types import FinishReason, OutcomeKind, Prompt, RewardOutcome, Segment

from .trainer_run import GROUPS, MEMBERS, VOCABULARY, TrainerRun, opened_run, write_run_file


async def test_tokens_of_an_earlier_stage_keep_that_stages_logprobs(
    tmp_path: Path, tiny_model: Path, server: EmbeddedServer
) -> None:
    config = write_run_file(
        tmp_path / "run",
        tiny_model,
        server,
        trainer={"train_steps": 2, "algorithm": {"old_logprobs": "stage_end"}},
        schedule={"preset": "copris_paper"},
    )
    async with opened_run(config) as run:
        run.start()
        await run.until("the initial policy", lambda: _announced(run, 0), pause=0.05)
        first, second = await _admit(run)
        session = await run.store.open_session("feeder")
        leased = await run.store.lease(session, 2 * GROUPS * MEMBERS)
        ids = [item.trajectory.trajectory_id for item in leased]
        early = [i for i in ids if i.rpartition(".")[0] in first]
        late = [i for i in ids if i.rpartition(".")[0] in second]
        assert len(early) == len(late) == GROUPS * MEMBERS
        await run.store.append(
            session, [Append(trajectory_id=i, token_offset=0, segments=[_segment(i, 0)]) for i in late]
        )
        await _end(run, session, early, version=0, offset=0)
        await run.store.release(session, late, "paused")
        await run.store.cut(run.leader, 1, first)
        await run.until("version 1", lambda: _announced(run, 1), pause=0.02)
        again = await run.store.lease(session, GROUPS * MEMBERS)
        assert sorted(i.trajectory.trajectory_id for i in again) == sorted(late)
        await _end(run, session, late, version=1, offset=6)
        await run.store.cut(run.leader, 2, second)
        await run.until_finished()
        lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
        assert lines[1]["batch"]["version_span"]["mean"] == 1.0
        assert sum(lines[1]["policy"]["old_logprob_fallbacks"].values()) == 0


async def _admit(run: TrainerRun) -> tuple[list[str], list[str]]:
    token = await run.store.acquire_leadership("feeder")
    assert token is not None
    run.leader = token
    await run.store.set_desired(token, Desired(pool_size=2 * GROUPS * MEMBERS))
    groups = [
        NewGroup(
            group_id=f"e0-{g}",
            prompt=Prompt(prompt_id=f"e0-{g}", token_ids=np.arange(1, 5, dtype=np.int32), verifier="exact"),
            needed=MEMBERS,
            epoch=0,
            index=g,
        )
        for g in range(2 * GROUPS)
    ]
    await run.store.admit(token, groups, Cursor(), Cursor(epoch=0, index=2 * GROUPS))
    ids = [g.group_id for g in groups]
    return ids[:GROUPS], ids[GROUPS:]


async def _end(run: TrainerRun, session: str, ids: list[str], *, version: int, offset: int) -> None:
    finishes = [
        Finish(trajectory_id=i, token_offset=offset, segments=[_segment(i, version)], finish_reason=FinishReason.STOP)
        for i in ids
    ]
    await run.store.finish(session, finishes)
    scores = [
        Score(
            trajectory_id=i,
            outcome=RewardOutcome(kind=OutcomeKind.SCORED, value=float(i[-1])),
            shaped_reward=float(i[-1]),
        )
        for i in ids
    ]
    await run.store.score(session, scores)


def _segment(trajectory_id: str, version: int) -> Segment:
    noise = np.random.default_rng([version, *trajectory_id.encode()])
    return Segment(
        token_ids=noise.integers(0, VOCABULARY, 6).astype(np.int32),
        behavior_logprobs=np.full(6, -3.4, np.float32),
        policy_version=version,
        kv_min_version=version,
    )


async def _announced(run: TrainerRun, version: int) -> bool:
    latest = await run.store.latest_policy()
    return latest is not None and latest.policy_version >= version
