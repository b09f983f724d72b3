"""Ways to a green audit of a run that has not earned it: each of them is red or incomplete, and says why."""

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
from rollmesh.types import Batch, Group, PolicyRecord, Segment, SegmentSource, Trajectory

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


def with_segments(run: MadeRun, only: str = "", at: int = 6, **changes: Any) -> None:
    """Write other fields of the policy's segments, in one batch or in all."""
    change = resampled(lambda segment: dataclasses.replace(segment, **changes), only)
    run.replace_batch(at, change) if only else run.replace_batches(change)


def with_group(run: MadeRun, at: int, change: Callable[[Group, Group], Group]) -> None:
    """Replace the second group of a batch by what ``change`` makes of it and the first one of batch 2."""
    other = run.store.read_batch(2).groups[0]
    run.replace_batch(at, lambda b: dataclasses.replace(b, groups=(b.groups[0], change(b.groups[1], other))))


def too_old(run: MadeRun) -> None:
    old = run.store.read_batch(1).groups[0].trajectories[0]
    stale = rewritten(lambda t: dataclasses.replace(t, prompt=old.prompt, segments=old.segments), "e0-10.1")
    run.replace_batch(6, stale)


def in_a_bfloat16_run(run: MadeRun, change: Callable[[Segment], Segment]) -> None:
    run.change_config(model={"dtype": "bfloat16"})
    run.replace_batch(4, resampled(change))


def with_impure_segments(run: MadeRun, mode: str, *, all_of_them: bool) -> None:
    run.change_config(generator={"on_new_version": mode})
    if all_of_them:
        with_segments(run, kv_min_version=-1)


def waiting(run: MadeRun, **changes: Any) -> None:
    """The first group of batch 2 is in a batch file that is not committed, too."""
    (group,) = run.store.read_batch(2).groups[:1]
    write_batch(run.store, Batch(train_step=7, groups=(dataclasses.replace(group, **changes),)), Cursor())


def short(file: Path, by: int = 1) -> None:
    file.write_bytes(file.read_bytes()[:-by])


def weights_of(run: MadeRun) -> Path:
    (file,) = newest_state(run).glob("*.safetensors")
    return file


def batch_file(run: MadeRun, step: int) -> Path:
    return run.folder / "checkpoints" / "batches" / f"{step:08d}.pb"


Fault = tuple[Callable[[MadeRun], object], str, dict[str, Any]]
MISSING_BATCH = "train step 3 has no valid batch file"
NEWER_ANNOUNCED = "a policy of train step 6 was announced"
FAULTS: dict[str, Fault] = {
    "a log-probability": (
        lambda run: run.replace_batch(4, resampled(off_by(5e-4, last=True), "e0-6.0")),
        "policy version 3",
        {},
    ),
    "a wrong version": (
        lambda run: with_segments(run, "e0-10.0", policy_version=4, kv_min_version=4),
        "policy version 4",
        {},
    ),
    "a group in two batches": (
        lambda run: with_group(run, 5, lambda _, other: other),
        "e0-2 at steps 2 and 5",
        {"trained_twice": {"e0-2": (2, 5)}},
    ),
    "a group that waits": (waiting, "e0-2", {"trained_twice": {"e0-2": (2, 7)}, "batch_files": 6, "groups": 12}),
    "a trajectory in another group": (
        lambda run: with_group(run, 3, lambda own, other: dataclasses.replace(own, trajectories=other.trajectories)),
        "2 trajectories are in more than one place: e0-2.0 in e0-2 and e0-5",
        {"trajectories_twice": {"e0-2.0": ("e0-2", "e0-5"), "e0-2.1": ("e0-2", "e0-5")}},
    ),
    "a trajectory twice in a group": (
        lambda run: with_group(run, 3, lambda own, _: dataclasses.replace(own, trajectories=own.trajectories[:1] * 2)),
        "e0-5.0",
        {"trajectories_twice": {"e0-5.0": ("e0-5", "e0-5")}},
    ),
    "a trajectory that waits in another group": (
        lambda run: waiting(run, group_id="e0-40"),
        "2 trajectories are in more than one place",
        {"trajectories_twice": {"e0-2.0": ("e0-2", "e0-40"), "e0-2.1": ("e0-2", "e0-40")}},
    ),
    "no batch file": (lambda run: batch_file(run, 3).unlink(), MISSING_BATCH, {"batch_files": 5}),
    "half a batch file": (lambda run: short(batch_file(run, 3), 20), MISSING_BATCH, {"batch_files": 5}),
    "a trajectory over the bound": (too_old, "", {"staleness_violations": ("e0-10.1",), "largest_staleness": 5}),
    "a train step that nothing names": (lambda run: shutil.rmtree(the_policy(run, 1)), "train step is unknown", {}),
    "no state": (
        lambda run: shutil.rmtree(run.folder / "checkpoints" / "states"),
        "",
        {"committed_step": -1, "groups": 0},
    ),
    "no run file": (lambda run: (run.folder / "config.yaml").unlink(), "the staleness bound is not known", {}),
    "bfloat16, 40 nats": (
        lambda run: in_a_bfloat16_run(run, off_by(-40.0, last=True)),
        "policy version 3: ",
        {},
    ),
    "bfloat16, no number": (lambda run: in_a_bfloat16_run(run, off_by(float("nan"), last=True)), "are not finite", {}),
    "bfloat16, another policy": (
        lambda run: in_a_bfloat16_run(run, off_by(-0.5)),
        "policy version 3: mean gap of 0.",
        {},
    ),
    "a short commit": (lambda run: short(newest_state(run) / "COMMITTED"), NEWER_ANNOUNCED, {"committed_step": 5}),
    "a short state": (lambda run: short(weights_of(run)), NEWER_ANNOUNCED, {"committed_step": 5}),
    "a flipped state": (lambda run: flip(weights_of(run), -1), "trainer state 00000006-s6 is damaged", {}),
    "a short manifest of the newest policy": (
        lambda run: short(the_policy(run, STEPS) / "manifest.json"),
        "the newest policy is damaged, the newest sound version is 5: ",
        {},
    ),
    "flipped weights of the newest policy": (
        lambda run: flip(the_policy(run, STEPS) / "model.safetensors", -1),
        "model.safetensors",
        {},
    ),
}
UNCHECKED: dict[str, tuple[Callable[[MadeRun], object], str]] = {
    "all are impure": (
        lambda run: with_impure_segments(run, "drain", all_of_them=True),
        "generator.on_new_version=drain never does",
    ),
    "a few are impure": (
        lambda run: with_impure_segments(run, "interrupt", all_of_them=False),
        "5 segments (25 tokens)",
    ),
    "none was sampled": (
        lambda run: with_segments(run, source=SegmentSource.ENVIRONMENT, behavior_logprobs=None),
        "no batch file contains a sampled token",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_red_and_said(audited: MadeRun, name: str) -> None:
    change, told, found = FAULTS[name]
    change(audited)
    result = audit_run(audited.folder)
    assert not result.green
    assert any(told in problem for problem in result.problems), result.problems
    assert {field: getattr(result, field) for field in found} == found
    json.dumps(dataclasses.asdict(result), allow_nan=False)


@pytest.mark.parametrize("name", UNCHECKED)
def test_tokens_that_nothing_scores_again_make_an_audit_incomplete(audited: MadeRun, name: str) -> None:
    change, told = UNCHECKED[name]
    change(audited)
    result = audit_run(audited.folder)
    assert (result.verdict, result.green, result.problems) == ("incomplete", False, ())
    assert any(told in reason for reason in result.unchecked), result.unchecked


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
    short(manifest, 7)


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


def test_a_newest_policy_that_is_gone_is_red_beside_the_registry(audited: MadeRun) -> None:
    account = account_of(audited, policies=policies_of(audited))
    shutil.rmtree(the_policy(audited, STEPS))
    assert any(the_policy(audited, STEPS).name in problem for problem in audit_run(audited.folder, account).problems)


def test_another_folder_in_the_place_of_the_announced_one_is_red(audited: MadeRun) -> None:
    announced = policies_of(audited)
    the_policy(audited, 2).rename(the_policy(audited, 2).with_name("00000002-another"))
    result = audit_run(audited.folder, account_of(audited, policies=announced))
    assert not result.green
    assert any("the registry announced policies/00000002-s2, which is missing" in p for p in result.problems)


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
