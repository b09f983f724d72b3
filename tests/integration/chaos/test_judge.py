"""The outside judge finds no problem in a sound run, and each fault in a copy that has one."""

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from rollmesh.config.trainer import TrainerConfig
from rollmesh.mesh import Cursor
from rollmesh.trainer.learner.policy_trainer import PolicyTrainer
from rollmesh.types import Batch, Group, Segment, SegmentSource, TeacherColumn, Trajectory

from ...chaos.judge import judge
from ...kit.checkpoint_samples import flip, publish, write_batch
from ...kit.made_batches import sets_of
from ..report.made_checkpoints import GROUPS, STEPS, MadeRun, make_audited_run, rewritten

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with real policies, states and batch files, made once; never change it."""
    return make_audited_run(tmp_path_factory.mktemp("made") / "run").folder


@pytest.fixture
def run(original: Path, tmp_path: Path) -> MadeRun:
    """A copy to break."""
    shutil.copytree(original, tmp_path / "run")
    copy = MadeRun(tmp_path / "run")
    copy.change_config(schedule={"max_staleness": 4})
    return copy


def with_group(number: int, change: Callable[[Group], Group]) -> Callable[[Batch], Batch]:
    """The batch with one of its groups changed."""

    def changed(batch: Batch) -> Batch:
        groups = (change(group) if at == number else group for at, group in enumerate(batch.groups))
        return dataclasses.replace(batch, groups=tuple(groups))

    return changed


def with_members(change: Callable[[Trajectory], Trajectory], group: int = 0, most: int = 9) -> Callable[[Batch], Batch]:
    """The batch with the first ``most`` trajectories of a group changed."""

    def changed(found: Group) -> Group:
        members = found.trajectories
        return dataclasses.replace(found, trajectories=(*map(change, members[:most]), *members[most:]))

    return with_group(group, changed)


def with_member(change: Callable[[Trajectory], Trajectory]) -> Callable[[Batch], Batch]:
    """The batch with the first trajectory changed."""
    return with_members(change, most=1)


def with_segments(change: Callable[[Segment], Segment]) -> Callable[[Trajectory], Trajectory]:
    """A trajectory with its segments changed."""
    return lambda t: dataclasses.replace(t, segments=tuple(map(change, t.segments)))


def with_prompt(prompt_id: str) -> Callable[[Trajectory], Trajectory]:
    """A trajectory with this prompt."""
    return lambda t: dataclasses.replace(t, prompt=dataclasses.replace(t.prompt, prompt_id=prompt_id))


def the_problem(run: Any) -> str:
    """The only problem that the judge names."""
    (problem,) = judge(run.folder).problems
    return problem


def test_a_sound_run_has_no_problem_and_every_pure_token_is_scored(run: Any) -> None:
    judgement = judge(run.folder)
    assert judgement.problems == ()
    assert (judgement.committed, judgement.trajectories, judgement.scored_tokens) == (STEPS, 24, 5 * 37)
    assert 0 < judgement.largest_gap < 1e-4


def test_a_trajectory_in_two_groups_is_found(run: Any) -> None:
    stolen = run.store.read_batch(2).groups[0].trajectories[0]

    def doubled(group: Group) -> Group:
        mine = dataclasses.replace(stolen, group_id=group.group_id, prompt=group.trajectories[1].prompt)
        return dataclasses.replace(group, trajectories=(mine, *group.trajectories[1:]))

    run.replace_batch(3, with_group(0, doubled))
    assert "1 trajectory(s) were trained more than once: e0-2.0" in judge(run.folder).problems


def test_a_group_that_was_trained_twice_is_found(run: Any) -> None:
    again = run.store.read_batch(2).groups[1]
    run.replace_batch(5, with_group(1, lambda _: again))
    problems = judge(run.folder).problems
    assert "1 group(s) were trained more than once: e0-3" in problems


def test_a_prompt_under_two_group_ids_is_found(run: Any) -> None:
    prompt_id = run.store.read_batch(2).groups[1].trajectories[0].prompt.prompt_id
    run.replace_batch(5, with_member(with_prompt(prompt_id)))
    assert the_problem(run) == f"1 prompt(s) were trained more than once: e0 {prompt_id}"


def test_a_lost_trajectory_is_found(run: Any) -> None:
    run.replace_batch(3, with_group(0, lambda g: dataclasses.replace(g, trajectories=g.trajectories[1:])))
    assert the_problem(run) == "1 member(s) of groups are missing, of which 0 had no score"


def test_a_group_that_was_admitted_long_ago_and_never_trained_is_found(run: Any) -> None:
    run.change_config(schedule={"max_staleness": 1, "pool_size": None})
    file = run.folder / "checkpoints" / "batches" / "00000001.pb"
    batch = run.store.read_batch(1)
    file.unlink()

    def renamed(group: Group) -> Group:
        trajectories = tuple(dataclasses.replace(t, group_id="e0-40") for t in group.trajectories)
        return dataclasses.replace(group, group_id="e0-40", trajectories=trajectories)

    write_batch(run.store, with_group(0, renamed)(batch), Cursor(epoch=0, index=2))
    lost = "1 groups admitted before train step 1 are lost: e0-0"
    assert lost in judge(run.folder).problems
    # With rollpacker, as many groups may wait for a long round: B - 1, and the spare ones of a round.
    run.change_config(schedule={"preset": "rollpacker", "groups_per_batch": 1, "spare_groups": 0})
    assert lost in judge(run.folder).problems
    run.change_config(schedule={"groups_per_batch": 2})
    assert lost not in judge(run.folder).problems
    run.change_config(schedule={"on_stale": "pace"})
    assert lost in judge(run.folder).problems
    dropped = {"dropped_groups": {"straggler_timeout": 1}, "totals": {}}
    lines = (json.dumps({"train_step": step, "mesh": dropped}) + "\n" for step in range(1, STEPS + 1))
    (run.folder / "metrics.jsonl").write_text("".join(lines))
    assert lost not in judge(run.folder).problems


@pytest.mark.parametrize("at", [40, 400, -200, -2])
def test_a_byte_that_is_flipped_in_a_batch_file_is_found(run: Any, at: int) -> None:
    flip(run.folder / "checkpoints" / "batches" / "00000004.pb", at)
    problems = judge(run.folder).problems
    assert any(problem.startswith("batches/00000004.pb: ") for problem in problems)
    assert "train step 6 is committed; there is no sound batch file of steps [4]" in problems


@pytest.mark.parametrize("delete_state", [False, True])
def test_a_lost_newest_state_is_found(run: Any, delete_state: bool) -> None:
    state = run.folder / "checkpoints" / "states" / f"{STEPS:08d}-s{STEPS}"
    if delete_state:
        shutil.rmtree(state)
    else:
        flip(state / "COMMITTED", 100)
    problems = judge(run.folder).problems
    assert "train step 5 is committed, but a policy of step 6 was announced" in problems
    assert any(problem.startswith(f"trainer state {state.name}: ") for problem in problems) is not delete_state


def test_a_damaged_policy_is_found_where_tokens_name_it_and_a_pruned_one_is_not(run: Any) -> None:
    for step in range(1, STEPS + 1):
        batch = run.store.read_batch(step)
        (run.folder / "checkpoints" / "batches" / f"{step:08d}.pb").unlink()
        write_batch(run.store, batch, Cursor(), {version: version for version in range(STEPS)})
    folder = run.folder / "checkpoints" / "policies" / "00000003-s3"
    flip(folder / "model.safetensors", -5)
    assert the_problem(run).startswith("policy version 3, which trained tokens name: 00000003-s3: model.safetensors")
    shutil.rmtree(folder)
    assert judge(run.folder).sound


def test_a_trajectory_beyond_the_staleness_bound_is_found(run: Any) -> None:
    run.change_config(schedule={"max_staleness": 1})
    (problem,) = judge(run.folder).problems
    assert problem.startswith("8 trajectories are older than 1 steps, or of no known version: e0-4.1, ")


@pytest.mark.parametrize("off", [2e-3, float("nan")])
def test_a_wrong_logprob_is_found(run: Any, off: float) -> None:
    def change(segment: Segment) -> Segment:
        assert segment.behavior_logprobs is not None
        logprobs = segment.behavior_logprobs.copy()
        logprobs[2] += off
        return dataclasses.replace(segment, behavior_logprobs=logprobs)

    run.replace_batch(4, with_member(with_segments(change)))
    assert the_problem(run).startswith("policy version 3: a log-probability is ")


def test_an_altered_kept_set_is_found(run: Any) -> None:
    def alone(segment: Segment) -> Segment:
        return dataclasses.replace(
            segment, kept_sets=segment.kept_sets and sets_of([[int(token)] for token in segment.token_ids])
        )

    run.replace_batch(4, with_members(with_segments(alone)))
    assert "policy version 3" in the_problem(run)


def test_tokens_of_another_version_than_they_name_are_found(run: Any) -> None:
    def rename(segment: Segment) -> Segment:
        return dataclasses.replace(segment, policy_version=4, kv_min_version=4)

    run.replace_batch(6, with_member(with_segments(rename)))
    assert the_problem(run).startswith("policy version 4: a log-probability is ")


def with_column(trajectory: Trajectory, digest: str = "ab" * 32, missing: int = 0) -> Trajectory:
    """A trajectory with a column of a teacher, which lacks so many of its scores."""
    logprobs = -np.ones(trajectory.response_token_count - missing, np.float32)
    column = TeacherColumn(teacher="wise", manifest_digest=digest, logprobs=logprobs)
    return dataclasses.replace(trajectory, teacher=column)


def test_a_missing_a_short_and_a_foreign_column_of_a_teacher_are_found(run: Any) -> None:
    config = yaml.safe_load((run.folder / "config.yaml").read_text())
    config["teachers"] = {"wise": {"model": "recipe:countdown"}}
    (run.folder / "config.yaml").write_text(yaml.safe_dump(config))
    run.replace_batches(rewritten(with_column))
    assert judge(run.folder).problems == ()
    run.replace_batch(2, with_member(lambda t: dataclasses.replace(t, teacher=None)))
    run.replace_batch(3, with_member(lambda t: with_column(t, missing=1)))
    assert the_problem(run) == "2 trajectories do not have one sound column of a teacher: e0-2.0, e0-4.0"
    run.replace_batches(rewritten(with_column))
    run.replace_batch(3, with_member(lambda t: with_column(t, "cd" * 32)))
    assert the_problem(run) == "teacher wise had 2 models"


def test_a_run_of_which_nothing_can_be_scored_is_not_sound(run: Any) -> None:
    def change(segment: Segment) -> Segment:
        return dataclasses.replace(segment, kv_min_version=-1) if segment.source is SegmentSource.POLICY else segment

    for step in range(1, STEPS + 1):
        for group in range(GROUPS):
            run.replace_batch(step, with_members(with_segments(change), group))
    assert the_problem(run) == "0 of 0 sampled tokens could be scored"


def test_the_judge_imports_nothing_of_rollmesh() -> None:
    names = "m for m in sys.modules if m.startswith(('rollmesh', 'tests.chaos.'))"
    code = f"import tests.chaos.judge, sys; print([{names}])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    mine = {f"tests.chaos.judge{part}" for part in ("", ".files", ".full_weights", ".trained_groups", ".scores")}
    assert set(json.loads(done.stdout.replace("'", '"'))) == mine


@pytest.mark.parametrize(("rate", "sound"), [(1e-3, True), (1.1e-3, False)])
@pytest.mark.parametrize(("advantage", "most_stale"), [("grpo", None), ("dr_grpo", None), ("grpo", 0)])
def test_weights_that_are_not_those_of_the_recorded_settings_are_found(
    run: Any, rate: float, sound: bool, advantage: str, most_stale: int | None
) -> None:
    store, versions = run.store, {version: version for version in range(STEPS)}
    root = run.folder / "checkpoints"
    config = TrainerConfig.model_validate(
        {"train_steps": STEPS, "learning_rate": rate, "device": "cpu", "algorithm": {"advantage": advantage}}
    )
    trainer = PolicyTrainer(root / "policies" / "00000004-s4", config, max_token_staleness=most_stale)
    trainer.train_step = 4
    tensors, extra = trainer.state_tensors(), trainer.state_extra()
    store.save_state(session="a", train_step=4, rollback_count=0, tensors=tensors, extra=extra)
    batch, settings = store.read_batch(5), trainer.settings(5)
    trainer.train(batch, versions, settings)
    shutil.rmtree(root / "policies" / "00000005-s5")
    publish(store, 5, session="a", write=trainer.export)
    (root / "batches" / "00000005.pb").unlink()
    write_batch(store, batch, Cursor(), versions, settings.model_copy(update={"learning_rate": 1e-3}))
    judgement = judge(run.folder)
    assert judgement.replay_distance is not None
    assert (judgement.replay_distance < 1e-3) is sound
    assert any(problem.startswith("a replayed step is ") for problem in judgement.problems) is not sound
