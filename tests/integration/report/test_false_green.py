"""Ways to a green audit of a run that has not earned it: each of them is red or incomplete, and says why."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from rollmesh.mesh import Cursor
from rollmesh.report.audit import audit_run, print_audit
from rollmesh.report.audit_result import AuditResult
from rollmesh.report.ledger_check import QueueAccount
from rollmesh.types import Batch, PolicyRecord, SegmentSource, Trajectory

from ...kit.checkpoint_samples import flip, write_batch
from .made_checkpoints import STEPS, MadeRun, hf_logprobs, off_by, resampled, rewritten


def policies_of(audited: MadeRun) -> tuple[PolicyRecord, ...]:
    """Return the announced policies."""
    return tuple(audited.store.complete_policies())


def account_of(audited: MadeRun, **changes: Any) -> QueueAccount:
    """Return the counts of a queue in which everything is trained."""
    return QueueAccount(**{"live": (), "dropped": {}, "cursor": Cursor(epoch=0, index=12), **changes})


def the_policy(audited: MadeRun, version: int) -> Path:
    folder: Path = audited.folder / "checkpoints" / "policies" / f"{version:08d}-s{version}"
    return folder


def newest_state(audited: MadeRun) -> Path:
    folder: Path = audited.folder / "checkpoints" / "states" / f"{STEPS:08d}-s{STEPS}"
    return folder


def forget_versions(audited: MadeRun, *versions: int) -> None:
    """Remove policies as pruning does; the metrics still name their train steps."""
    for version in versions:
        shutil.rmtree(the_policy(audited, version))
    lines = [json.dumps({"train_step": step, "policy_version": step}) for step in range(1, STEPS + 1)]
    (audited.folder / "metrics.jsonl").write_text("\n".join(lines), encoding="utf-8")


@pytest.mark.parametrize("mode", ["interrupt", "drain"])
def test_segments_that_are_all_impure_are_not_green_where_no_generator_keeps_its_cache(
    audited: MadeRun, mode: str
) -> None:
    audited.change_config(generator={"on_new_version": mode})
    audited.replace_batches(resampled(lambda s: dataclasses.replace(s, kv_min_version=-1)))
    result = audit_run(audited.folder)
    assert not result.green
    assert result.verdict == "incomplete"
    assert any(f"generator.on_new_version={mode} never does" in reason for reason in result.unchecked)


def test_a_few_impure_segments_are_not_green_where_no_generator_keeps_its_cache(audited: MadeRun) -> None:
    audited.change_config(generator={"on_new_version": "interrupt"})
    result = audit_run(audited.folder)
    assert not result.green
    assert (result.verdict, result.problems, len(result.unchecked)) == ("incomplete", (), 1)
    assert "5 segments (25 tokens)" in result.unchecked[0]


def test_a_run_of_which_no_token_was_scored_again_is_not_green(audited: MadeRun) -> None:
    environment = {"source": SegmentSource.ENVIRONMENT, "behavior_logprobs": None}
    audited.replace_batches(resampled(lambda s: dataclasses.replace(s, **environment)))
    result = audit_run(audited.folder)
    assert not result.green
    assert result.verdict == "incomplete"
    assert any("no batch file contains a sampled token" in reason for reason in result.unchecked)


def last_line(result: AuditResult) -> str:
    out = io.StringIO()
    print_audit(result, Console(file=out, width=120))
    return out.getvalue().splitlines()[-1]


MOST_GONE = (
    "audit INCOMPLETE: 19.0% of 210 policy tokens were scored again; 145 tokens, 69.0%, have no checkpoint any more"
)


@pytest.mark.parametrize(
    ("keep_last", "gone", "verdict", "reason", "line"),
    [
        (None, (0, 1, 2, 3), "incomplete", "40 of 210 policy tokens were scored again (without", f"{MOST_GONE}, 0 of"),
        (3, (0, 1, 2, 3), "incomplete", "has pruned, more than 25%", f"{MOST_GONE}, 145 of them pruned according to"),
        (3, (4,), "incomplete", "missing although checkpoints.keep_last retains them: 4.", "0 of them pruned"),
        (3, (1,), "green", None, "have no checkpoint any more, 30 of them pruned according to"),
    ],
    ids=["most are gone", "most are pruned", "one that is kept", "few are pruned"],
)
def test_tokens_of_policies_that_are_gone_are_counted_in_the_verdict_line(
    audited: MadeRun, keep_last: int | None, gone: tuple[int, ...], verdict: str, reason: str | None, line: str
) -> None:
    if keep_last is not None:
        audited.change_config(checkpoints={"keep_last": keep_last})
    forget_versions(audited, *gone)
    result = audit_run(audited.folder)
    assert (result.verdict, result.green, result.problems) == (verdict, verdict == "green", ())
    assert len(result.unchecked) == (reason is not None) and all(str(reason) in text for text in result.unchecked)
    assert line in last_line(result)


@pytest.mark.parametrize("off", [0.0, 3.0])
def test_a_run_whose_pruned_policies_have_a_large_share_of_the_tokens_is_incomplete(
    audited: MadeRun, off: float
) -> None:
    """They may be any number of nats off, and no check sees it."""
    audited.change_config(checkpoints={"keep_last": 3})
    forget_versions(audited, 0, 1)
    audited.replace_batches(resampled(lambda s: off_by(-off * (s.policy_version < 2))(s)))
    result = audit_run(audited.folder)
    assert (result.verdict, result.problems, result.green) == ("incomplete", (), False)
    (reason,) = result.unchecked
    assert reason.startswith("85 of 210 policy tokens name versions that checkpoints.keep_last has pruned, more than")
    assert result.is_accepted


def test_a_run_that_is_pruned_so_far_that_no_token_can_be_scored_is_incomplete(audited: MadeRun) -> None:
    audited.change_config(checkpoints={"keep_last": 2})
    forget_versions(audited, 0, 1, 2, 3, 4)
    audited.replace_batches(resampled(lambda s: dataclasses.replace(s, policy_version=0, kv_min_version=0)))
    result = audit_run(audited.folder)
    assert not result.green
    assert any("0 of 0 policy tokens" in reason for reason in result.unchecked)


@pytest.mark.parametrize(("gap", "told"), [(-40.0, "nats from its checkpoint"), (float("nan"), "are not finite")])
def test_a_bfloat16_token_that_is_30_nats_off_or_no_number_is_red(audited: MadeRun, gap: float, told: str) -> None:
    audited.change_config(model={"dtype": "bfloat16"})
    audited.replace_batch(4, resampled(off_by(gap, last=True)))
    result = audit_run(audited.folder)
    assert not result.green
    assert any(problem.startswith("policy version 3: ") and told in problem for problem in result.problems)
    json.loads(json.dumps(dataclasses.asdict(result), allow_nan=False))


def test_bfloat16_logprobs_of_another_policy_are_red_by_their_mean(audited: MadeRun) -> None:
    audited.change_config(model={"dtype": "bfloat16"})
    audited.replace_batch(4, resampled(off_by(-0.5)))
    result = audit_run(audited.folder)
    assert not result.green
    assert any("policy version 3: mean gap of 0." in problem for problem in result.problems)


def in_bfloat16(audited: MadeRun, by: float) -> AuditResult:
    """Audit the run as if an engine had sampled in bfloat16: Hugging Face's logprobs of that dtype, moved by ``by``."""
    audited.change_config(model={"dtype": "bfloat16"})
    load = AutoModelForCausalLM.from_pretrained
    models = {v: load(the_policy(audited, v), dtype=torch.bfloat16).eval() for v in range(STEPS)}

    def rounded(trajectory: Trajectory) -> Trajectory:
        context, segments = trajectory.prompt.token_ids, []
        for segment in trajectory.segments:
            if segment.source is SegmentSource.POLICY:
                scores = hf_logprobs(
                    models[segment.policy_version], context, segment.token_ids, kept_sets=segment.kept_sets
                )
                segment = dataclasses.replace(segment, behavior_logprobs=scores + np.float32(by))
            segments.append(segment)
            context = np.concatenate([context, segment.token_ids])
        return dataclasses.replace(trajectory, segments=tuple(segments))

    audited.replace_batches(rewritten(rounded))
    return audit_run(audited.folder)


def test_an_engine_that_rounds_to_bfloat16_is_green(audited: MadeRun) -> None:
    result = in_bfloat16(audited, 0.0)
    assert result.rescoring is not None
    assert (result.green, result.problems) == (True, ())
    assert result.rescoring.largest_gap > 1e-3


@pytest.mark.parametrize("drift", [0.03, -0.1])
def test_a_drift_that_the_rounding_of_the_same_weights_does_not_explain_is_red(audited: MadeRun, drift: float) -> None:
    result = in_bfloat16(audited, drift)
    assert not result.green
    assert any(problem.startswith("policy version 3: mean gap of 0.") for problem in result.problems)


def torn(manifest: Path) -> None:
    manifest.write_bytes(manifest.read_bytes()[:-7])


def forged(manifest: Path) -> None:
    content = json.loads(manifest.read_text())
    content["hmac"] = "0" * 64
    manifest.write_text(json.dumps(content))


@pytest.mark.parametrize(
    "damage",
    [
        torn,
        forged,
        Path.unlink,
        lambda manifest: (manifest.parent / "model.safetensors").unlink(),
        lambda manifest: flip(manifest.parent / "model.safetensors", -1),
    ],
    ids=["torn", "forged", "no manifest", "no weights", "flipped weights"],
)
@pytest.mark.parametrize("with_queue", [False, True])
def test_a_damaged_manifest_is_refused_and_not_called_pruned(
    audited: MadeRun, damage: Callable[[Path], None], with_queue: bool
) -> None:
    account = account_of(audited, policies=policies_of(audited)) if with_queue else None
    (audited.folder / "metrics.jsonl").write_text('{"train_step": 2, "policy_version": 2}\n', encoding="utf-8")
    damage(the_policy(audited, 2) / "manifest.json")
    result = audit_run(audited.folder, account)
    assert not result.green
    assert any("policy version 2: checkpoint refused" in problem for problem in result.problems)


def test_a_manifest_that_the_registry_did_not_announce_is_red(audited: MadeRun) -> None:
    announced = policies_of(audited)
    digest = hashlib.sha256(b"what was announced").hexdigest()
    others = tuple(dataclasses.replace(r, manifest_digest=digest) if r.policy_version == 2 else r for r in announced)
    result = audit_run(audited.folder, account_of(audited, policies=others))
    assert not result.green
    assert any("policy version 2: checkpoint refused" in p and "announced" in p for p in result.problems)
    sound = audit_run(audited.folder, account_of(audited, policies=announced))
    assert sound.green and sound.rescoring is not None and sound.rescoring.announced_manifests == 6


def test_another_folder_in_the_place_of_the_announced_one_is_red(audited: MadeRun) -> None:
    announced = policies_of(audited)
    the_policy(audited, 2).rename(the_policy(audited, 2).with_name("00000002-another"))
    result = audit_run(audited.folder, account_of(audited, policies=announced))
    assert not result.green
    assert any("the registry announced policies/00000002-s2, which is missing" in p for p in result.problems)


def cut_committed(state: Path) -> None:
    file = state / "COMMITTED"
    file.write_bytes(file.read_bytes()[:-1])


def cut_weights(state: Path) -> None:
    (file,) = state.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [cut_committed, cut_weights])
def test_a_newest_state_that_is_one_byte_short_is_red(audited: MadeRun, damage: Callable[[Path], None]) -> None:
    damage(newest_state(audited))
    result = audit_run(audited.folder)
    assert not result.green
    assert result.committed_step == STEPS - 1
    assert list(result.unsound_states) == [newest_state(audited).name]
    assert any("a policy of train step 6 was announced" in problem for problem in result.problems)


def test_one_byte_flipped_in_the_newest_state_is_red(audited: MadeRun) -> None:
    (file,) = newest_state(audited).glob("*.safetensors")
    flip(file, -1)
    result = audit_run(audited.folder)
    assert not result.green
    assert any(f"trainer state {newest_state(audited).name} is damaged" in problem for problem in result.problems)


def flip_committed(state: Path) -> None:
    flip(state / "COMMITTED", -100)


@pytest.mark.parametrize("lose_state", [flip_committed, shutil.rmtree], ids=["flipped", "deleted"])
@pytest.mark.parametrize("with_queue", [False, True])
def test_a_lost_newest_state_beside_a_flipped_byte_of_its_batch_file_is_red(
    audited: MadeRun, lose_state: Callable[[Path], None], with_queue: bool
) -> None:
    lose_state(newest_state(audited))
    file = audited.folder / "checkpoints" / "batches" / f"{STEPS:08d}.pb"
    flip(file, 200)
    if with_queue:
        for marker in (audited.folder / "checkpoints" / "policies").glob("*/ANNOUNCED"):
            marker.unlink()
    account = account_of(audited, policies=policies_of(audited)) if with_queue else None
    result = audit_run(audited.folder, account)
    assert not result.green
    assert (result.committed_step, result.announced_step) == (STEPS - 1, STEPS)
    assert any("train step 5 is the newest that is committed" in problem for problem in result.problems)
    assert any("train step 6 has no valid batch file" in problem for problem in result.problems)


def test_states_of_every_third_step_lag_behind_the_announced_policy_and_are_green(audited: MadeRun) -> None:
    audited.change_config(checkpoints={"state_every_steps": 3}, trainer={"train_steps": 12})
    for step in (4, 5, 6):
        shutil.rmtree(audited.folder / "checkpoints" / "states" / f"{step:08d}-s{step}")
    lagging = audit_run(audited.folder)
    assert any("train step 3 is the newest that is committed" in p for p in lagging.problems), "step 6 saves a state"
    shutil.rmtree(the_policy(audited, 6))
    result = audit_run(audited.folder)
    assert (result.problems, result.committed_step, result.announced_step) == ((), 3, 5)


def test_the_same_trajectory_in_another_group_is_red(audited: MadeRun) -> None:
    stolen = audited.store.read_batch(2).groups[0].trajectories

    def under_another_group(batch: Batch) -> Batch:
        group = dataclasses.replace(batch.groups[1], trajectories=stolen)
        return dataclasses.replace(batch, groups=(batch.groups[0], group))

    audited.replace_batch(3, under_another_group)
    result = audit_run(audited.folder)
    assert not result.green
    assert result.trajectories_twice == {"e0-2.0": ("e0-2", "e0-5"), "e0-2.1": ("e0-2", "e0-5")}
    assert any("2 trajectories are in more than one place: e0-2.0 in e0-2 and e0-5" in p for p in result.problems)


def test_the_same_trajectory_twice_in_one_group_is_red(audited: MadeRun) -> None:
    def doubled(batch: Batch) -> Batch:
        first, *rest = batch.groups
        twice = dataclasses.replace(first, trajectories=(first.trajectories[0],) * 2)
        return dataclasses.replace(batch, groups=(twice, *rest))

    audited.replace_batch(3, doubled)
    result = audit_run(audited.folder)
    assert not result.green
    assert result.trajectories_twice == {"e0-4.0": ("e0-4", "e0-4")}


def test_a_trajectory_that_waits_in_another_group_of_an_uncommitted_batch_file_is_red(audited: MadeRun) -> None:
    (group,) = audited.store.read_batch(2).groups[:1]
    write_batch(audited.store, Batch(train_step=7, groups=(dataclasses.replace(group, group_id="e0-40"),)), Cursor())
    result = audit_run(audited.folder)
    assert not result.green
    assert list(result.trajectories_twice) == ["e0-2.0", "e0-2.1"]
