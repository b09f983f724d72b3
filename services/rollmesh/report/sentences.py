"""Descriptions of a run as sentences and facts, and the ending of one that no launcher runs any more."""

import time
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from rollmesh.report.audit_result import AuditResult, AuditVerdict, Rescoring, TeacherCheck
from rollmesh.report.console import count, domain_scores, duration, gap, listed, percent, plus_minus, print_sentence
from rollmesh.report.recorded_run import REPORT_FILE, Evaluation, RecordedRun
from rollmesh.report.series import seconds_of_training
from rollmesh.report.summary import RunSummary, summarise

NOISE_STANDARD_ERRORS = 2.0
"""Number of standard errors below which a difference counts as noise."""


class Sentence(NamedTuple):
    """Statement about a run; ``bad`` marks problems."""

    text: str
    bad: bool = False


def sentences(summary: RunSummary) -> tuple[Sentence, ...]:
    """Describe the run, most important sentences first."""
    parts = (_progress, _nothing_learned, _evaluation, _waste, _audit)
    return tuple(sentence for part in parts for sentence in part(summary))


def facts(summary: RunSummary) -> list[tuple[str, str]]:
    """Return (name, value) pairs of the known facts, for a table."""
    planned = f" of {summary.planned_steps}" if summary.planned_steps is not None else ""
    sizes = summary.rollouts_per_group if len(summary.rollouts_per_group) > 1 else {}
    factor, rounds = summary.mean_rate_factor, summary.rounds_per_group
    rows: list[tuple[str, str | None]] = [
        ("schedule", summary.preset),
        ("on a new version", summary.on_new_version),
        ("train steps", f"{summary.train_steps}{planned}"),
        ("policy versions", count(summary.policy_versions)),
        ("training time", duration(summary.training_seconds)),
        (f"{summary.score_name} before", _point(summary.before)),
        (f"{summary.score_name} after", _point(summary.after)),
        ("tokens trained", count(summary.trained_tokens)),
        ("tokens generated, with evaluations", count(summary.generated_tokens)),
        ("goodput at the last train step", percent(summary.goodput)),
        ("generated per second", count(summary.generated_per_second)),
        ("re-prefilled of prefilled tokens", percent(summary.reprefill_share)),
        ("idle slot time of generators", percent(summary.bubble_ratio)),
        ("idle slot time during rollout", percent(summary.rollout_bubble_ratio)),
        ("draft tokens accepted, each a decode step saved", _drafts(summary)),
        ("off-policy tokens", percent(summary.off_policy_share)),
        ("staleness", _staleness(summary)),
        ("masked tokens", ", ".join(f"{mask} {tokens:,}" for mask, tokens in summary.masked_tokens.items())),
        ("trajectories without a pass", count(summary.skipped_trajectories or None)),
        ("mean factor on the learning rate", None if factor is None else f"{factor:.3f}"),
        ("replayed trajectories", percent(summary.replayed_share)),
        ("rounds per group", None if rounds is None else f"{rounds:.2f}"),
        ("trained groups by rollouts", ", ".join(f"{groups:,} of {size}" for size, groups in sizes.items())),
        *_scores_by_domain(summary),
        *((f"domain {name}", _domain(totals)) for name, totals in summary.domains.items()),
        ("audit", summary.audit_verdict),
    ]
    return [(name, value) for name, value in rows if value]


def _drafts(summary: RunSummary) -> str | None:
    accepted, drafted = summary.accepted_tokens, summary.drafted_tokens
    return None if accepted is None or not drafted else f"{accepted:,} of {drafted:,}"


def moment(point: Evaluation, summary: RunSummary) -> str:
    """Describe the time of an evaluation relative to the training."""
    if not summary.sessions or point.when is None:
        return ""
    if point.when <= summary.sessions[0][0]:
        return "before training"
    if point.when >= summary.sessions[-1][1]:
        return "after training" if summary.finished else "after the last step so far"
    (seconds,) = seconds_of_training(np.array(summary.sessions), np.array([point.when]))
    return f"{duration(float(seconds))} into training"


def _scores_by_domain(summary: RunSummary) -> Iterator[tuple[str, str | None]]:
    points = [point for point in (summary.before, summary.after) if point is not None]
    for name in dict.fromkeys(name for point in points for name in point.domains):
        scores = {f"policy version {p.policy_version}": {name: p.domains[name]} for p in points if name in p.domains}
        texts = (f"{domain_scores(score)[0].removeprefix(name + ' ')} of {at}" for at, score in scores.items())
        yield f"{summary.score_name} on {name}", ", ".join(texts)
    for name, (first, last) in summary.reward_by_domain.items():
        yield f"reward on {name}", f"{first:.3f} at the first train step with it, {last:.3f} at the last one"


def _domain(totals: Mapping[str, int]) -> str:
    drawn, completed, solved, tokens = (totals[name] for name in ("drawn", "completed", "solved", "tokens"))
    rate = f" ({percent(solved / completed)})" if completed else ""
    return f"{drawn:,} groups drawn, {completed:,} trajectories completed, {solved:,} solved{rate}, {tokens:,} tokens"


def _point(point: Evaluation | None) -> str | None:
    if point is None:
        return None
    return f"{point.mean:.3f} {plus_minus(point.standard_error)} (n={point.n}, policy version {point.policy_version})"


def _staleness(summary: RunSummary) -> str | None:
    if summary.mean_staleness is None:
        return None
    bound = f", bound {summary.max_staleness}" if summary.max_staleness is not None else ""
    return f"mean {summary.mean_staleness:.2f}, largest {summary.largest_staleness}{bound} train steps"


def _progress(summary: RunSummary) -> Iterator[Sentence]:
    if summary.train_steps == 0:
        yield Sentence("No train step has been recorded.", bad=True)
        return
    elapsed = duration(summary.training_seconds)
    versions = "" if summary.policy_versions is None else f", {summary.policy_versions} policy versions were published"
    text = f"{summary.train_steps} train steps were completed{f' in {elapsed}' if elapsed else ''}{versions}."
    if summary.planned_steps is not None and not summary.finished:
        yield Sentence(f"{text} The run is not finished: {summary.planned_steps} were planned.", bad=True)
    else:
        yield Sentence(text)


def _nothing_learned(summary: RunSummary) -> Iterator[Sentence]:
    if summary.unserved_after is not None:
        yield Sentence(
            f"No policy version after {summary.unserved_after} was served: the logs of the generators say why. "
            "Lower trainer.learning_rate if they name values that are not finite.",
            bad=True,
        )
    if summary.skipped_updates:
        updates = f"{summary.skipped_updates} update{'s' * (summary.skipped_updates > 1)}"
        yield Sentence(
            f"{updates} skipped, because the gradient was not finite; lower trainer.learning_rate.", bad=True
        )
    if summary.steps_of_equal_rewards and summary.steps_of_equal_rewards == summary.train_steps:
        yield Sentence(
            "Every reward of a batch was the same, at every train step: the verifier does not tell answers apart.",
            bad=True,
        )


def _evaluation(summary: RunSummary) -> Iterator[Sentence]:
    name = summary.score_name.capitalize()
    if summary.gain is None or summary.before is None or summary.after is None:
        if summary.after is not None:
            yield Sentence(f"{name} was evaluated once only: {_point(summary.after)}. No gain can be stated.")
        else:
            yield Sentence("No evaluation was recorded, so no gain is claimed.")
        return
    before, after, (difference, error) = summary.before, summary.after, summary.gain
    text = f"{name} on the evaluation prompts: {_point(before)} before, {_point(after)} after"
    if error is None:
        yield Sentence(f"{text}; no standard error is known, so the difference is not judged.")
    elif abs(difference) < NOISE_STANDARD_ERRORS * error:
        yield Sentence(f"{text}. The difference of {difference:+.3f} is within noise (standard error {error:.3f}).")
    else:
        change = "gain" if difference > 0 else "loss"
        yield Sentence(f"{text}: a {change} of {abs(difference):.3f} ± {error:.3f}.", bad=difference < 0)
    if after.shortage:
        yield Sentence(f"{after.shortage[0].upper()}{after.shortage[1:]}.")


def _waste(summary: RunSummary) -> Iterator[Sentence]:
    if summary.off_policy_share is not None:
        yield Sentence(
            f"{percent(summary.off_policy_share)} of the trained tokens were sampled from an older policy than "
            "the newest one at that time"
            + (f"; staleness was {_staleness(summary)}." if summary.mean_staleness is not None else ".")
        )
    dropped = {reason: number for reason, number in summary.dropped.items() if number}
    if dropped:
        reasons = ", ".join(f"{number} {reason}" for reason, number in sorted(dropped.items()))
        yield Sentence(f"Groups dropped without being trained, by reason: {reasons}.")
    yield from map(Sentence, lengths_of_waste(summary))


def lengths_of_waste(summary: RunSummary) -> Iterator[str]:
    """Yield sentences on dropped groups, on groups that began again and on surplus members, by length decile."""
    if any(summary.dropped_share):
        shares = ", ".join("none ended" if s is None else f"{100 * s:.0f}%" for s in summary.dropped_share)
        yield f"Share of dropped groups by length decile, the shortest first: {shares}."
    if summary.begun_again:
        kinds = " and ".join(f"{number:,} {kind}" for kind, number in summary.begun_again.items())
        yield f"Groups that lost their tokens and began again: {kinds}."
    for kind, numbers in summary.begun_again_by_decile.items():
        yield f"Groups {kind}, by length decile of the longest member, the shortest first: {_joined(numbers)}."
    if any(summary.surplus_by_decile):
        yield (
            f"Members cut off as surplus, with {summary.surplus_tokens:,} saved tokens, by length decile at that time, "
            f"the shortest first: {_joined(summary.surplus_by_decile)}."
        )


def _joined(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))


def _audit(summary: RunSummary) -> Iterator[Sentence]:
    audit = summary.audit
    if audit is None:
        yield Sentence("No audit was run, so nothing is claimed about lost or repeated groups.")
        return
    verdict = _verdict("The audit is", audit, summary.audited_part)
    yield Sentence(f"{verdict}: {'; '.join(audit_claims(audit))}.", bad=not audit.green)
    if summary.audited_part:
        yield Sentence(
            "The train steps after it have not been audited: continue the run, or run `rollmesh audit` again.",
            bad=True,
        )
    for problem in (*audit.problems, *audit.unchecked):
        yield Sentence(problem, bad=True)


def verdict_line(audit: AuditResult, part: str = "") -> str:
    """State the verdict, the share of tokens that were scored again, and the tokens without a checkpoint.

    ``part`` is the part of the run that the audit covers, as ``RunSummary.audited_part``.
    """
    line, rescoring = _verdict("audit", audit, part), audit.rescoring
    if rescoring is None or rescoring.scored_share is None:
        return f"{line}: no token was scored again"
    line += f": {percent(rescoring.scored_share)} of {rescoring.policy_tokens:,} policy tokens were scored again"
    if rescoring.skipped_tokens:
        share = percent(rescoring.skipped_tokens / rescoring.policy_tokens)
        line += f"; {rescoring.skipped_tokens:,} tokens, {share}, have no checkpoint any more"
        line += f", {rescoring.pruned_tokens:,} of them pruned according to checkpoints.keep_last"
    return line


def _verdict(subject: str, audit: AuditResult, part: str) -> str:
    labels = {AuditVerdict.GREEN: "green", AuditVerdict.NOT_GREEN: "NOT green", AuditVerdict.INCOMPLETE: "INCOMPLETE"}
    return f"{subject} {labels[audit.verdict]}{f' {part}' if part else ''}"


def audit_claims(audit: AuditResult) -> list[str]:
    """Describe the counts of an audit, each with its source."""
    checked = sum(audit.staleness_counts.values())
    claims = [
        f"{audit.groups} groups in {audit.batch_files} of {max(audit.committed_step, 0)} batch files up to committed "
        f"step {audit.committed_step}",
        f"trained twice {len(audit.trained_twice)}",
        f"staleness violations {len(audit.staleness_violations)} of {checked:,} trajectories in a loss"
        + (f" ({audit.staleness_unknown:,} more not checked)" if audit.staleness_unknown else "")
        if audit.max_staleness is not None
        else "staleness not checked (the bound is not known)",
    ]
    if audit.replayed_groups:
        claims.insert(
            2,
            f"replayed {audit.replayed_groups:,} groups of earlier batches, staleness at most "
            f"{max(audit.replay_staleness, default=0)}",
        )
    if audit.lost is not None:
        claims.append(
            f"lost {len(audit.lost)}" + (f" ({audit.lost_note})" if audit.lost_note and audit.forgotten else "")
        )
    else:
        claims.append(f"lost not checked ({audit.lost_note})" if audit.lost_note else "lost not checked")
    if both := audit.dropped_and_trained:
        claims.append(f"dropped by the queue, but trained from a batch file {len(both)} ({listed(both)})")
    if audit.copies_note:
        claims.append(f"bucket: {audit.copies_note}")
    if audit.rescoring is not None:
        claims.append(rescoring_claim(audit.rescoring))
    claims += [_teacher_claim(check) for check in audit.teachers]
    return claims


def _teacher_claim(check: TeacherCheck) -> str:
    """Describe the columns of a teacher, and those that were computed again."""
    digests = listed([digest[:12] for digest in check.manifest_digests]) or "none"
    claim = f"teacher {check.teacher} ({digests}): {check.columns:,} columns, {check.tokens:,} tokens"
    if check.largest_gap is None:
        return f"{claim}; none computed again: {check.note}"
    return (
        f"{claim}; {check.checked_tokens:,} tokens of {check.checked_columns} columns computed again, largest gap "
        f"{gap(check.largest_gap)} nats"
    )


def rescoring_claim(rescoring: Rescoring) -> str:
    """Describe the coverage of the re-scoring, the largest gap, and the skipped segments."""
    notes = []
    if rescoring.skipped_impure_segments:
        share = _of_policy(rescoring.skipped_impure_tokens, rescoring)
        notes.append(f"{rescoring.skipped_impure_segments} keep_kv segments{share} have no single policy")
    if rescoring.skipped_segments:
        skipped = rescoring.skipped_segments / (rescoring.skipped_segments + rescoring.segments)
        notes.append(f"{rescoring.skipped_segments} segments, {percent(skipped)}, have no checkpoint any more")
    if rescoring.unresolvable:
        largest = max(version.largest_unresolvable for version in rescoring.versions)
        excused = 100 * rescoring.unresolvable / rescoring.tokens
        notes.append(
            f"{rescoring.unresolvable} tokens over the bound, {excused:.2g}% and up to {gap(largest)} nats, lie "
            "within the float32 resolution of these tokens"
        )
    if rescoring.announced_manifests is None:
        notes.append("manifests not compared with the registry, which was unreachable")
    else:
        scored = sum(not version.skipped for version in rescoring.versions)
        notes.append(f"{rescoring.announced_manifests} of {scored} manifests compared with the registry")
    suffix = f" ({', '.join(notes)})"
    if rescoring.largest_gap is None:
        return f"no segment could be re-scored{suffix}"
    return (
        f"{rescoring.tokens:,} tokens of {rescoring.segments:,} segments"
        f"{_of_policy(rescoring.tokens, rescoring)} re-scored with their checkpoint, largest gap "
        f"{gap(rescoring.largest_gap)} nats ({rescoring.dtype}, bound {rescoring.bound:g}){suffix}"
    )


def _of_policy(tokens: int, rescoring: Rescoring) -> str:
    return f", {percent(tokens / rescoring.policy_tokens)} of the policy's tokens," if rescoring.policy_tokens else ""


def print_summary(summary: RunSummary, console: Console) -> None:
    """Print the summary as a short table and sentences."""
    table = Table(title=f"run {summary.name}", title_justify="left", show_header=False, box=None, padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, value in facts(summary):
        table.add_row(name, value)
    console.print(table)
    for sentence in sentences(summary):
        print_sentence(console, f"- {sentence.text}", "red" if sentence.bad else "")


def ending(run: RecordedRun, summary: RunSummary | None = None, now: float | None = None) -> list[tuple[str, str]]:
    """Return (name, value) pairs about a run without a launcher; ``now`` is in Unix seconds."""
    summary = summary or summarise(run)
    rows = [("state", _state(run, summary, time.time() if now is None else now))]
    if run.metrics.records and isinstance(reward := run.metrics.records[-1].get("reward_mean"), int | float):
        rows.append(("reward of the last step", f"{reward:.3f}"))
    evaluations = (f"{summary.score_name} before", f"{summary.score_name} after", "training time")
    rows += [(name, value) for name, value in facts(summary) if name in evaluations]
    audit = summary.audit
    rows.append(("audit", "not run" if audit is None else verdict_line(audit, summary.audited_part)))
    if (run.path / REPORT_FILE).exists():
        rows.append(("report", f"{run.path / REPORT_FILE}"))
    return rows


def _state(run: RecordedRun, summary: RunSummary, now: float) -> str:
    planned = "" if summary.planned_steps is None else f" of {summary.planned_steps}"
    times = [t for record in run.metrics.records[-1:] if isinstance(t := record.get("time"), int | float)]
    when = ""
    if times:
        local = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(times[0]))
        when = f" at {local} ({duration(max(0.0, now - times[0]))} ago)"
    if run.failure:
        return f"failed after train step {summary.train_steps}{planned}{when}"
    if summary.finished:
        return f"finished: train step {summary.train_steps}{planned}{when}"
    if not summary.train_steps:
        return "stopped before the first train step; the command that started it continues it"
    return f"stopped after train step {summary.train_steps}{planned}{when}; the command that started it continues it"
