"""The paper's old logprobs: unfinished trajectories are scored at the end of each stage, before the weights change."""

import numpy as np
import pytest

from rollmesh.store import Append, Finish, TokenDigest
from rollmesh.types import FinishReason, Segment

from ...kit.records import policy_tokens
from .trainer_run import GROUPS, MEMBERS, VOCABULARY, Runs, TrainerRun

pytestmark = pytest.mark.slow

STAGES, TOKENS = 3, 6

BETWEEN_STAGES = {
    "the state after a stage is committed": "states/00000001-*/COMMITTED",
    "a policy folder is begun": "policies/00000002-*",
    "a stage has ended": "batches/00000002.pb",
}


async def test_tokens_of_an_earlier_stage_keep_that_stages_logprobs_through_kills(runs: Runs) -> None:
    expected = await _weights_after_stages(runs, "calm")
    for number, pattern in enumerate(BETWEEN_STAGES.values()):
        found = await _weights_after_stages(runs, f"killed-{number}", kill_at=pattern)
        assert found == expected, pattern


async def test_ranks_continue_from_the_records_of_their_stages(runs: Runs) -> None:
    await _weights_after_stages(runs, "ranks", kill_at="states/00000002-*/COMMITTED", ranks=2)


async def _weights_after_stages(runs: Runs, name: str, *, kill_at: str = "", ranks: int = 1) -> bytes:
    """Train the batches of all stages; those of later ones gain tokens in every stage. The trainer is killed once."""
    async with runs(
        name,
        trainer={"train_steps": STAGES, "algorithm": {"old_logprobs": "stage_end"}},
        schedule={"preset": "copris_paper"},
    ) as run:
        run.start(ranks)
        await run.until_version(0)
        admitted = await run.admit(STAGES * GROUPS)
        batches = [admitted[at : at + GROUPS] for at in range(0, len(admitted), GROUPS)]
        session = await run.store.sessions.open("feeder")
        for stage in range(STAGES):
            leased = await run.store.trajectories.lease(session, STAGES * GROUPS * MEMBERS)
            ids = [item.trajectory.trajectory_id for item in leased]
            assert len(ids) == (STAGES - stage) * GROUPS * MEMBERS
            ended = [i for i in ids if i.rpartition(".")[0] in batches[stage]]
            parked = [i for i in ids if i not in ended]
            offset = TOKENS * stage
            await run.store.trajectories.append(
                session,
                [
                    Append(
                        trajectory_id=i, token_offset=offset, segments=[_segment(i, stage)], digest=_before(i, stage)
                    )
                    for i in parked
                ],
            )
            await _end(run, session, ended, version=stage, offset=offset)
            await run.store.trajectories.release(session, parked, "paused")
            await run.store.leadership.cut(run.leader, stage + 1, batches[stage])
            if kill_at.partition("/")[2].startswith(f"{stage + 1:08d}"):
                await run.until(kill_at, lambda: any(run.checkpoints.root.glob(kill_at)))
                run.kill()
                run.start(ranks)
            await run.until_version(stage + 1)
        await run.until_finished()
        lines = run.lines()
        assert [line["batch"]["version_span"]["mean"] for line in lines] == [0.0, 1.0, 2.0]
        assert [sum(line["policy"]["old_logprob_fallbacks"].values()) for line in lines] == [0, 0, 0]
        (state,) = run.checkpoints.committed_states()[:1]
        assert state.record.extra["train_step"] == STAGES
        assert "stage" not in state.record.extra, "nothing is in flight at the end"
        return await run.last_weights()


async def _end(run: TrainerRun, session: str, ids: list[str], *, version: int, offset: int) -> None:
    finishes = [
        Finish(
            trajectory_id=i,
            token_offset=offset,
            segments=[_segment(i, version)],
            finish_reason=FinishReason.STOP,
            digest=_before(i, version),
        )
        for i in ids
    ]
    await run.store.trajectories.finish(session, finishes)
    await run.store.trajectories.score(session, [run.score_of(i) for i in ids])


def _before(trajectory_id: str, version: int) -> TokenDigest:
    """Digest of what the stages before this one wrote."""
    return TokenDigest().extended(_segment(trajectory_id, earlier) for earlier in range(version))


def _segment(trajectory_id: str, version: int) -> Segment:
    noise = np.random.default_rng([version, *trajectory_id.encode()])
    ids = noise.integers(0, VOCABULARY, TOKENS).astype(np.int32)
    return policy_tokens(ids, version, behavior_logprobs=np.full(TOKENS, -3.4, np.float32))
