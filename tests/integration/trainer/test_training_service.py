"""The trainer as a process: what it leaves behind when nothing goes wrong, and when it is asked to stop."""

import shutil
import signal
from dataclasses import replace

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file

from rollmesh.checkpoints.bucket import BucketStore
from rollmesh.runtime.endpoints import read_endpoints
from rollmesh.runtime.lifecycle import EXIT_CONFIG, EXIT_UNFINISHED
from rollmesh.scheduling import run_limits
from rollmesh.trainer.learner.policy_scorer import PolicyScorer
from rollmesh.trainer.service.step_summaries import reported
from rollmesh.types import GeneratorWork

from ...kit.checkpoint_samples import flip_object
from ...kit.ledger import read_ledger
from ...kit.records import generator_record
from .trainer_run import GROUPS, SECRET, START_SECONDS, Runs

pytestmark = pytest.mark.slow


async def test_a_run_trains_every_batch_once_and_publishes_every_version(runs: Runs) -> None:
    async with runs() as run:
        # No generator runs here: this one is what the trainer is told.
        told = generator_record("told", slot_count=1, work=GeneratorWork(prefill_tokens=1, generated_tokens=1_000_000))
        await run.store.generators.register(told, ttl=600)
        run.start()
        async with run.fed(4):
            await run.until_finished()
        records = await run.store.policies.announced()
        state = await run.store.training.state()
        assert [(r.policy_version, r.train_step) for r in records] == [(v, v) for v in range(5)]
        assert (state.trained_step, state.committed_step) == (4, 4)
        assert read_ledger(run.checkpoints).groups == {s: run.cuts[s - 1] for s in range(1, 5)}
        groups = [g for s in range(1, 5) for g in run.checkpoints.read_batch(s).groups]
        # They were saved in two chunks, by one policy version.
        assert {len(t.segments) for g in groups for t in g.trajectories} == {1}
        first = run.checkpoints.open(records[0]).manifest
        for record in records:
            policy = run.checkpoints.open(record, like=first)
            manifest = policy.manifest
            assert manifest.parent == (record.policy_version - 1 if record.policy_version else None)
            assert len(manifest.canary) == 8
            ids = [np.array(sequence.token_ids, np.int32) for sequence in manifest.canary]
            for sequence, scores in zip(manifest.canary, PolicyScorer.from_policy(policy).logprobs(ids), strict=True):
                np.testing.assert_allclose(sequence.logprobs, scores, atol=1e-5)
        initial, last = (
            load_file(run.checkpoints.open(r).folder / "model.safetensors") for r in (records[0], records[-1])
        )
        assert any((initial[name] != last[name]).any() for name in initial)
        lines = run.lines()
        assert [(m["train_step"], m["policy_version"]) for m in lines] == [(s, s) for s in range(1, 5)]
        assert lines[-1]["batch"]["groups"] == GROUPS
        mesh = lines[-1]["mesh"]
        assert mesh["trained_token_total"] > 0 and mesh["generated_token_total"] == 1_000_000
        assert mesh["goodput"] == mesh["trained_token_total"] / 1_000_000
        samples = run.lines("samples.jsonl")
        assert {s["train_step"] for s in samples} == {1, 2, 3, 4}


async def test_sigterm_commits_the_trained_step_and_the_next_start_continues(runs: Runs) -> None:
    async with runs(checkpoints={"state_every_steps": 3}) as run:
        process = run.start(fresh=True)
        async with run.fed(2):
            await run.until_version(2)
            (endpoint,) = read_endpoints(run.folder, "trainer")
            async with httpx.AsyncClient(timeout=60.0) as client:
                metrics = (await client.get(f"http://{endpoint.admin}/metrics")).text
            assert "rollmesh_trainer_train_step" in metrics
            process.send_signal(signal.SIGTERM)
            assert process.wait(120) == EXIT_UNFINISHED, "a Job would be complete after status 0"
            stopped = run.checkpoints.latest_committed()
            assert stopped is not None
            assert stopped.train_step >= 2
            assert read_endpoints(run.folder, "trainer") == []
            run.start()
            await run.feed(2)
            await run.until_finished(START_SECONDS)
        assert [r.train_step for r in await run.store.policies.announced()] == [0, 1, 2, 3, 4]
        assert read_ledger(run.checkpoints).committed_step == 4


@pytest.mark.parametrize("damage", ["model.safetensors", "manifest.json", "gone", "in the bucket"])
async def test_a_newest_policy_that_was_damaged_at_rest_is_published_again_as_the_next_version(
    runs: Runs, damage: str, request: pytest.FixtureRequest
) -> None:
    section = request.getfixturevalue("own_bucket").section("run") if damage == "in the bucket" else None
    async with runs(checkpoints=section.model_dump(include={"folder", "object_store"}) if section else {}) as run:
        process = run.start()
        async with run.fed(4):
            await run.until_version(2)
            process.send_signal(signal.SIGTERM)
            assert process.wait(120) in (0, EXIT_UNFINISHED)
            newest = (await run.store.policies.announced())[-1]
            folder = run.checkpoints.root / newest.path
            weights = load_file(folder / "model.safetensors")
            if damage == "gone":
                shutil.rmtree(folder)
            elif isinstance(run.checkpoints, BucketStore):  # the copies of this node are whole
                names = run.checkpoints.objects.sizes(newest.path)
                flip_object(run.checkpoints.objects, next(name for name in names if "model.safetensors" in name))
            else:
                file = folder / damage
                file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))
            run.start()
            await run.until_finished()
        policies = await run.store.policies.announced()
        repaired = policies[newest.policy_version + 1]
        assert (repaired.train_step, policies[-1].train_step) == (newest.train_step, 4)
        opened = run.checkpoints.open(repaired)
        assert opened.manifest.parent == newest.policy_version
        again = load_file(opened.folder / "model.safetensors")
        assert weights.keys() == again.keys()
        assert all(np.array_equal(weights[name], again[name]) for name in weights)


async def test_what_the_queue_knows_of_the_steps_outlives_the_folder_of_a_trainer_that_was_killed(runs: Runs) -> None:
    async with runs(checkpoints={"state_every_steps": 2}) as run:

        async def reported_steps() -> list[int]:
            return [report["train_step"] for report in await run.store.step_reports.read(0, 99)]

        async def third_step_is_reported() -> bool:
            return 3 in await reported_steps()

        run.start()
        async with run.fed(3):
            await run.until("the report of step 3", third_step_is_reported, pause=0.01)
            before = await run.store.step_reports.read(0, 99)
            run.kill()
            (run.folder / "metrics.jsonl").unlink()
            run.start()
            await run.feed(1)
            await run.until_finished()
        after = await run.store.step_reports.read(0, 99)
        assert await reported_steps() == [1, 2, 3, 4]
        assert after[:2] == before[:2]
        assert after[2]["time"] > before[2]["time"], "the step was trained again"
        lines = run.lines()
        assert after[2:] == [reported(line) for line in lines]


async def test_a_second_run_of_the_same_name_on_one_redis_is_refused_before_it_touches_the_queue(runs: Runs) -> None:
    async with runs(trainer={"train_steps": 1}) as run:
        await run.train(1)
        async with replace(runs, folder=runs.folder / "elsewhere")(trainer={"train_steps": 1}) as other:
            other.start()
            with pytest.raises(pytest.fail.Exception, match="the trainer ended"):
                await other.until_finished()
            assert "belongs to another run" in other.log()
            assert "choose another name" in other.log()
        assert (await run.store.training.state()).trained_step == 1
        assert [r.policy_version for r in await run.store.policies.announced()] == [0, 1]


async def test_a_start_with_another_secret_is_refused_and_changes_nothing(runs: Runs) -> None:
    async with runs(trainer={"train_steps": 2}) as run:
        await run.train(2)
        records = {name: (run.folder / name).read_bytes() for name in ("metrics.jsonl", "samples.jsonl")}
        state = await run.store.training.state()
        runs.file(trainer={"train_steps": 2}, checkpoints={"secret": SECRET[::-1]})
        run.start()
        assert await run.until_failed() == EXIT_CONFIG
        assert "if checkpoints.secret (or ROLLMESH_CHECKPOINTS__SECRET) has changed" in run.log()
        assert {name: (run.folder / name).read_bytes() for name in records} == records
        assert await run.store.training.state() == state
        runs.file(trainer={"train_steps": 2})
        run.start()
        await run.until_finished()
        assert {name: (run.folder / name).read_bytes() for name in records} == records


async def test_checkpoints_restored_from_an_older_copy_are_refused_until_the_queue_is_forgotten(runs: Runs) -> None:
    async with runs(trainer={"train_steps": 2}) as run:
        run.start()
        async with run.fed(2):
            await run.until_version(1)
            await run.until_finished()
        for late in [*run.checkpoints.root.glob("*/00000002-*"), *run.checkpoints.root.glob("batches/00000002*")]:
            shutil.rmtree(late) if late.is_dir() else late.unlink()
        run.start()
        with pytest.raises(pytest.fail.Exception, match="the trainer ended"):
            await run.until_finished()
        assert "train step 1, but the queue has recorded step 2 as trained" in run.log()

        await run.store.connection.command("FLUSHDB")
        await run.store.limits.init_run(run_limits(run.config))

        async def rebuilt() -> bool:
            state = await run.store.training.state()
            return (state.trained_step, state.committed_step) == (1, 1)

        run.start()
        await run.until("the queue rebuilt from the checkpoints", rebuilt, pause=0.05)
        assert [r.policy_version for r in await run.store.policies.announced()] == [0, 1]
