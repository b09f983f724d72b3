import dataclasses
import io
import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from rollmesh.checkpoints.sealing import SECRET_FILE
from rollmesh.config import RunConfig, write_run_config
from rollmesh.errors import CheckpointError, DataError
from rollmesh.kept_sets import slice_sets
from rollmesh.mesh import Cursor
from rollmesh.report.audit import audit_run, open_checkpoints, print_audit, rescoring_problems
from rollmesh.report.audit_result import AuditResult, AuditVerdict, read_audit
from rollmesh.report.ledger_check import QueueAccount, lost_groups
from rollmesh.report.recorded_run import RecordedRun
from rollmesh.report.rescore import Gaps, gaps_of_version
from rollmesh.report.sentences import audit_claims, rescoring_claim
from rollmesh.runtime.capacity import Machine
from rollmesh.trainer.learner.policy_scorer import PolicyScorer
from rollmesh.types import Batch, OutcomeKind, RewardOutcome, Segment

from ...kit.checkpoint_samples import write_batch
from ...kit.made_batches import VOCAB, sets_of
from .made_checkpoints import MadeRun, off_by, resampled, rewritten


def test_a_sound_run_is_green_and_every_pure_segment_is_reproduced(audited: MadeRun) -> None:
    shown = io.StringIO()
    result = audit_run(audited.folder, progress=Console(file=shown, force_terminal=True, width=100))
    assert result.problems == ()
    assert result.green and "re-scoring policy versions" in shown.getvalue()
    assert (result.committed_step, result.batch_files, result.groups, result.trajectories) == (6, 6, 12, 24)
    assert result.policy_versions == (0, 1, 2, 3, 4, 5)
    scored = result.rescoring
    assert scored is not None and scored.largest_gap is not None
    assert 0 < scored.largest_gap < 1e-5
    # Per batch: 1 + 2 + 2 + 1 pure segments of 5 tokens, and one that used another version's cache. The first batch
    # has no older version: there the cache is its own.
    assert (scored.segments, scored.tokens) == (6 * 6 + 1, 5 * (6 * 6 + 1))
    assert scored.skipped_impure_segments == 5
    assert scored.skipped_segments == 0
    assert [v.policy_version for v in scored.versions] == [0, 1, 2, 3, 4, 5]
    # Two of four members hold 5 tokens each of the policy max(0, s - 3) in batch s; 35 tokens are written per batch.
    assert result.trained_tokens == 6 * 35
    assert result.off_policy_token_share == pytest.approx(5 * 10 / (6 * 35))
    assert dict(result.staleness_counts) == {0: 4 + 5 * 2, 1: 2, 2: 4 * 2}
    assert (result.largest_staleness, result.max_staleness) == (2, 4)
    assert result.mean_staleness == pytest.approx((2 + 16) / 24)
    assert (result.lost, result.lost_note) == (None, "queue unreachable")
    assert read_audit(audited.folder) == result
    assert json.loads(json.dumps(dataclasses.asdict(result), allow_nan=False))["green"] is True


def test_versions_that_are_scored_side_by_side_have_the_gaps_of_one_at_a_time(
    audited: MadeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    results: list[AuditResult] = []
    for models in (1, 3):
        threads, score = set[int](), PolicyScorer.logprobs

        def logprobs(*arguments: Any, threads: set[int] = threads, score: Any = score, **options: Any) -> Any:
            threads.add(threading.get_ident())
            return score(*arguments, **options)

        machine = Machine(cores=models * torch.get_num_threads(), available_bytes=0)
        with monkeypatch.context() as patched:
            patched.setattr("rollmesh.report.rescore.this_machine", lambda machine=machine: machine)
            patched.setattr(PolicyScorer, "logprobs", logprobs)
            results.append(audit_run(audited.folder))
        assert (threads == {threading.get_ident()}) == (models == 1)
    assert results[0] == results[1]


@pytest.mark.parametrize(
    "change",
    [
        lambda sets, token: [token],
        lambda sets, token: sorted({*sets, *range(0, VOCAB, 4)}),
        lambda sets, token: sorted({token, *(VOCAB - 1 - kept for kept in sets)}),
        lambda sets, token: [],
    ],
    ids=["smaller", "larger", "other", "none"],
)
def test_one_altered_kept_set_is_found_and_its_version_named(
    audited: MadeRun, change: Callable[[list[int], int], list[int]]
) -> None:
    def alter(segment: Segment) -> Segment:
        if segment.kept_sets is None:
            return segment
        sets = [slice_sets(segment.kept_sets, at, at + 1).ids.tolist() for at in range(len(segment))]
        sets[2] = change(sets[2], int(segment.token_ids[2]))
        return dataclasses.replace(segment, kept_sets=sets_of(sets))

    audited.replace_batch(4, resampled(alter, "e0-6.1"))
    (problem,) = audit_run(audited.folder).problems
    assert "policy version 3" in problem


def test_a_kept_set_without_its_token_is_no_valid_batch_file(audited: MadeRun) -> None:
    def alter(segment: Segment) -> Segment:
        others = [[(int(token) + 1) % VOCAB] for token in segment.token_ids]
        return dataclasses.replace(segment, kept_sets=segment.kept_sets and sets_of(others))

    audited.replace_batch(4, resampled(alter, "e0-6.1"))
    result = audit_run(audited.folder)
    assert list(result.damaged) == [4] and "not that of its token" in result.damaged[4]


def test_in_bfloat16_a_gap_that_rounding_explains_is_reported_and_green(audited: MadeRun) -> None:
    audited.change_config(model={"dtype": "bfloat16"})
    audited.replace_batch(4, resampled(off_by(0.5, last=True), "e0-6.0"))
    result = audit_run(audited.folder)
    assert result.green
    assert result.rescoring is not None
    assert (result.rescoring.dtype, result.rescoring.bound) == ("bfloat16", 3.0)
    assert result.rescoring.largest_gap == pytest.approx(0.5, rel=0.05)


def test_masked_old_segments_are_no_violation(audited: MadeRun) -> None:
    config = (audited.folder / "config.yaml").read_text()
    config = config.replace("on_stale: null", "on_stale: mask_old_segments")
    (audited.folder / "config.yaml").write_text(config.replace("max_staleness: null", "max_staleness: 1"))
    result = audit_run(audited.folder)
    assert result.green
    assert result.largest_staleness == 1
    # The 5-token segments that are two steps old are out of the loss, twice in each of the batches 3 to 6.
    assert result.trained_tokens == 6 * 35 - 4 * 2 * 5


@pytest.mark.parametrize(("outcome", "tokens"), [(None, 0), (RewardOutcome(kind=OutcomeKind.TIMED_OUT), 5)])
def test_a_trajectory_with_a_reward_from_any_source_is_in_the_loss(
    audited: MadeRun, outcome: RewardOutcome | None, tokens: int
) -> None:
    audited.replace_batch(6, rewritten(lambda t: dataclasses.replace(t, outcome=outcome), "e0-10.0"))
    result = audit_run(audited.folder)
    assert result.green
    assert result.trained_tokens == 6 * 35 - 5 + tokens


def test_a_pruned_checkpoint_is_counted_as_skipped_and_its_train_step_comes_from_the_metrics(audited: MadeRun) -> None:
    audited.change_config(checkpoints={"keep_last": 2})
    shutil.rmtree(audited.folder / "checkpoints" / "policies" / "00000001-s1")
    (audited.folder / "metrics.jsonl").write_text('{"train_step": 1, "policy_version": 1}\n', encoding="utf-8")
    result = audit_run(audited.folder)
    assert result.green
    assert result.rescoring is not None
    assert result.rescoring.skipped_segments > 0
    skipped = {v.policy_version: v.skipped for v in result.rescoring.versions if v.skipped}
    assert skipped == {1: "checkpoint pruned"}


def test_a_group_that_vanished_is_lost_and_one_with_a_reason_is_not(audited: MadeRun) -> None:
    cursor = Cursor(epoch=0, index=16)
    everything = QueueAccount(
        live={"e0-12", "e0-13"}, dropped={"e0-14": "filtered", "e0-15": "filtered"}, cursor=cursor
    )
    result = audit_run(audited.folder, everything)
    assert result.green and result.lost == ()
    assert result.dropped == {"filtered": 2}
    vanished = QueueAccount(live={"e0-12"}, dropped={"e0-14": "filtered"}, cursor=cursor)
    result = audit_run(audited.folder, vanished)
    assert result.lost == ("e0-13", "e0-15")
    assert any("2 admitted group(s) are lost: e0-13, e0-15" in problem for problem in result.problems)


def test_a_group_that_was_dropped_and_trained_is_named_and_counts_as_trained(audited: MadeRun) -> None:
    account = QueueAccount(live=(), dropped={"e0-1": "stale", "e0-12": "filtered"}, cursor=Cursor(epoch=0, index=13))
    result = audit_run(audited.folder, account)
    assert (result.dropped_and_trained, result.dropped) == (("e0-1",), {"filtered": 1})
    assert result.green, "Redis may have come back as an earlier state and dropped what the file has"
    assert "dropped by the queue, but trained from a batch file 1 (e0-1)" in audit_claims(result)
    assert AuditResult.from_json(result.to_json()) == result


def test_dropped_groups_that_the_ledger_no_longer_names_are_not_taken_for_lost(audited: MadeRun) -> None:
    cursor = Cursor(epoch=0, index=16)
    account = QueueAccount(live={"e0-15"}, dropped={"e0-14": "filtered"}, forgotten_drops=2, cursor=cursor)
    result = audit_run(audited.folder, account)
    assert result.green and result.lost == ()
    assert "no longer lists 2 groups" in result.lost_note
    one_more = QueueAccount(live=(), dropped={"e0-14": "filtered"}, forgotten_drops=2, cursor=cursor)
    result = audit_run(audited.folder, one_more)
    assert not result.green and result.lost == ("e0-15",)


def test_earlier_epochs_count_as_admitted_entirely() -> None:
    account = QueueAccount(
        live={"e2-0"},
        dropped={"e1-3": "filtered", "replay-1": "evicted"},
        cursor=Cursor(epoch=2, index=2),
        epoch_size=4,
    )
    trained = {"e0-0", "e0-1", "e0-2", "e0-3", "e1-0", "e1-1"}
    assert lost_groups(account, trained) == ("e1-2", "e2-1")


def test_a_replayed_dead_letter_that_vanished_is_lost_and_one_that_left_a_trace_is_not() -> None:
    account = QueueAccount(
        live={"e0-0r3"},
        dropped={"e0-0": "dead", "e0-1": "dead", "e0-1r2": "filtered"},
        cursor=Cursor(epoch=0, index=3),
        replays=("e0-0r1", "e0-1r2", "e0-0r3", "e0-1r4"),
    )
    assert lost_groups(account, {"e0-2", "e0-0r1"}) == ("e0-1r4",)
    assert lost_groups(account, {"e0-2"}) == ("e0-0r1", "e0-1r4")
    assert lost_groups(dataclasses.replace(account, forgotten_drops=1), {"e0-2"}) == ("e0-1r4",), (
        "the ledger let go of the oldest"
    )


def test_the_printed_audit_names_versions_problems_and_verdict(audited: MadeRun) -> None:
    audited.replace_batch(4, resampled(off_by(5e-4, last=True), "e0-6.0"))
    out = io.StringIO()
    print_audit(audit_run(audited.folder), Console(file=out, width=120))
    text = out.getvalue()
    assert "audit NOT green" in text
    assert "lost not checked" in text
    assert "trained twice 0" in text
    assert "policy version 3" in text


def test_a_folder_without_a_checkpoint_store_or_secret_is_a_clear_error(tmp_path: Path, audited: MadeRun) -> None:
    with pytest.raises(DataError, match="no checkpoint store"):
        audit_run(tmp_path)
    (audited.folder / "secret").unlink()
    with pytest.raises(CheckpointError, match="no secret"):
        audit_run(audited.folder)


def test_temperature_is_part_of_the_rescoring(audited: MadeRun, hf_logprobs: Callable[..., Any]) -> None:
    folder = audited.folder / "checkpoints" / "policies" / "00000003-s3"
    trajectory = audited.store.read_batch(4).groups[0].trajectories[0]
    segment = trajectory.segments[0]
    plain = AutoModelForCausalLM.from_pretrained(folder)
    logprobs = hf_logprobs(plain, trajectory.prompt.token_ids, segment.token_ids, temperature=0.7)
    cool = dataclasses.replace(segment, behavior_logprobs=logprobs, temperature=0.7)
    scorer = PolicyScorer.from_folder(folder, device="cpu")
    right = gaps_of_version(scorer, 3, [dataclasses.replace(trajectory, segments=(cool,))])
    assert right.values.shape == (len(segment),) and right.values.max() < 1e-5
    wrong = dataclasses.replace(cool, temperature=1.0)
    assert gaps_of_version(scorer, 3, [dataclasses.replace(trajectory, segments=(wrong,))]).values.max() > 0.01


@pytest.mark.parametrize(
    ("values", "resolution", "found", "excused"),
    [
        ([9e-5, 1.5e-4, 1.5e-4, 5e-3], [0.0, 2e-5, 1e-6, 2e-5], 2, [1.5e-4]),
        ([5e-3, 5e-1], [1e-2, 1e-2], 1, [5e-3]),
    ],
)
def test_a_gap_of_any_size_is_excused_only_where_float32_can_tell_no_better(
    values: list[float], resolution: list[float], found: int, excused: list[float]
) -> None:
    own, left = Gaps(values=np.array(values), resolution=np.array(resolution)).over(1e-4)
    assert (own, left.tolist()) == (found, excused)


@pytest.mark.parametrize(
    ("excused", "of_version", "of_run", "red"),
    [(4, 30_000, 400, False), (4, 30_000, 300, True), (20, 2_000, 100_000, False), (21, 2_000, 100_000, True)],
)
def test_too_many_excused_tokens_of_a_run_or_of_one_version_are_red(
    audited: MadeRun, excused: int, of_version: int, of_run: int, red: bool
) -> None:
    found = audit_run(audited.folder).rescoring
    assert found is not None
    version = dataclasses.replace(found.versions[0], tokens=of_version, unresolvable=excused, largest_unresolvable=3e-4)
    rescoring = dataclasses.replace(found, tokens=of_run, versions=(version, *found.versions[1:]))
    assert bool(list(rescoring_problems(rescoring))) is red
    told = f"{excused} tokens over the bound, {100 * excused / of_run:.2g}% and up to 0.0003 nats, lie within"
    assert told in rescoring_claim(rescoring)


def test_a_doubted_trajectory_is_judged_in_float64_with_what_the_last_bit_of_the_weights_does(
    audited: MadeRun, hf_logprobs: Callable[..., Any]
) -> None:
    folder = audited.folder / "checkpoints" / "policies" / "00000003-s3"
    trajectory = audited.store.read_batch(4).groups[0].trajectories[0]
    segment = trajectory.segments[0]
    true = hf_logprobs(AutoModelForCausalLM.from_pretrained(folder), trajectory.prompt.token_ids, segment.token_ids)
    off = dataclasses.replace(segment, behavior_logprobs=true + np.float32(3e-4))
    exact = PolicyScorer.from_folder(folder, device="cpu", dtype=torch.float64)
    before = exact.logprobs([trajectory.response_ids])[0]
    gaps = gaps_of_version(
        PolicyScorer.from_folder(folder, device="cpu"),
        3,
        [dataclasses.replace(trajectory, segments=(off,))],
        lambda: exact,
    )
    np.testing.assert_allclose(gaps.values, 3e-4, atol=1e-5)
    assert 0 < gaps.resolution.max() < 1e-5
    own, excused = gaps.over(1e-4)
    assert (own, len(excused)) == (len(segment), 0), "a wrong logprob is not excused by float32"
    np.testing.assert_array_equal(exact.logprobs([trajectory.response_ids])[0], before, "the weights are put back")


def test_a_run_whose_checkpoints_are_all_gone_is_not_vouched_for(audited: MadeRun) -> None:
    shutil.rmtree(audited.folder / "checkpoints" / "policies")
    lines = [json.dumps({"train_step": step, "policy_version": step}) for step in range(1, 7)]
    (audited.folder / "metrics.jsonl").write_text("\n".join(lines), encoding="utf-8")
    result = audit_run(audited.folder)
    assert result.staleness_unknown == 0
    assert result.verdict is AuditVerdict.INCOMPLETE and result.problems == ()
    assert len(result.unchecked) == 1 and "0 of 210 policy tokens were scored again" in result.unchecked[0]
    assert "37 segments, 100.0%, have no checkpoint any more" in audit_claims(result)[-1]


def test_a_queue_that_forgot_admissions_says_so_beside_its_count_of_lost_groups(audited: MadeRun) -> None:
    write_batch(audited.store, Batch(train_step=7, groups=()), Cursor(epoch=0, index=40))
    behind = audit_run(audited.folder, QueueAccount(live=(), dropped={}, cursor=Cursor(epoch=0, index=12)))
    assert behind.green and behind.lost == () and behind.forgotten
    (claim,) = [claim for claim in audit_claims(behind) if claim.startswith("lost 0")]
    assert "a batch file records epoch 0, index 40" in claim
    assert read_audit(audited.folder) == behind


def test_rewards_whose_sum_is_not_finite_end_no_audit(audited: MadeRun) -> None:
    audited.replace_batches(rewritten(lambda t: dataclasses.replace(t, shaped_reward=1e308)))
    assert audit_run(audited.folder).green


def test_the_environment_says_where_the_checkpoints_of_a_recorded_run_are_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A volume or a snapshot is mounted somewhere else on the machine that audits or exports."""
    moved, run = tmp_path / "snapshot", tmp_path / "run"
    moved.mkdir()
    run.mkdir()
    checkpoints = {"folder": "/no/such/volume", "keep_last": 7}
    values = {"name": "moved", "folder": str(run), "model": {"path": "models/tiny"}, "checkpoints": checkpoints}
    write_run_config(RunConfig.model_validate(values), run / "config.yaml")
    (run / SECRET_FILE).write_text("a" * 64, encoding="ascii")
    with pytest.raises(DataError, match="/no/such/volume: no checkpoint store"):
        open_checkpoints(RecordedRun(run))
    monkeypatch.setenv("ROLLMESH_CHECKPOINTS__FOLDER", str(moved))
    monkeypatch.setenv("ROLLMESH_CHECKPOINTS__KEEP_LAST", "9")
    recorded = RecordedRun(run)
    assert open_checkpoints(recorded).root == moved
    assert recorded.checkpoint_section.keep_last == 7
    assert recorded.config is not None and recorded.config.checkpoints.folder == "/no/such/volume"
