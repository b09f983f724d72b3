import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from rollmesh.report.audit_result import AuditResult
from rollmesh.report.console import duration
from rollmesh.report.recorded_run import RecordedRun
from rollmesh.report.sentences import ending, facts, moment, print_summary, sentences
from rollmesh.report.summary import summarise

from .made_run import START, write_lines


def words_of(folder: Path) -> str:
    return " ".join(s.text for s in sentences(summarise(folder)))


@contextmanager
def changed(folder: Path, name: str = "metrics.jsonl") -> Iterator[list[dict[str, Any]]]:
    """The records of a file, which is written again with what was changed in them."""
    lines = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    yield lines
    write_lines(folder / name, lines)


def replace_evaluations(folder: Path, *records: dict[str, Any]) -> None:
    write_lines(folder / "evaluations.jsonl", list(records))


def evaluation(version: int, mean: float, error: float | None = 0.03) -> dict[str, Any]:
    return {"policy_version": version, "n": 256, "mean": mean, "standard_error": error}


def test_a_complete_run_is_summarised_from_its_files(run_folder: Path) -> None:
    summary = summarise(run_folder)
    assert summary.train_steps == 12
    assert summary.finished
    assert summary.policy_versions == 13
    assert summary.score_name == "accuracy"
    assert summary.before is not None and summary.before.policy_version == 0
    assert summary.after is not None and summary.after.policy_version == 12
    assert summary.gain == pytest.approx((0.4, 0.0398), abs=1e-3)
    assert summary.max_staleness == 4
    assert summary.dropped == {"straggler_timeout": 2, "filtered": 0}
    assert summary.off_policy_share is not None and 0.2 < summary.off_policy_share < 0.4
    assert summary.training_seconds is not None and 50 < summary.training_seconds < 60
    assert summary.goodput == 0.87
    assert (summary.reprefill_share, summary.bubble_ratio) == (0.125, 0.25)
    assert summary.missing == ("audit.json: not written",)
    assert [moment(e, summary) for e in summary.evaluations] == ["before training", "after training"]
    (run_folder / "timeline.jsonl").unlink()
    assert summarise(run_folder).dropped == {"straggler_timeout": 1}, "those of the last step report"


def test_the_bubble_of_the_rollout_leaves_out_the_update_during_which_the_schedule_rests(run_folder: Path) -> None:
    asynchronous = summarise(run_folder)
    assert asynchronous.rollout_bubble_ratio == asynchronous.bubble_ratio == 0.25
    config = run_folder / "config.yaml"
    config.write_text(config.read_text().replace("preset: copris", "preset: sync").replace("max_staleness: 4", ""))
    with changed(run_folder) as lines:
        for step, line in enumerate(lines):
            # Of ten seconds between two steps, eight wait for the batch: 640 slot seconds, 512 of them of the rollout.
            line |= {"time": START + 10 * step, "wait_seconds": 8}
    summary = summarise(run_folder)
    assert summary.rollout_bubble_ratio == pytest.approx(1 - 480 / 512)
    assert dict(facts(summary))["idle slot time during rollout"] == "6.2%"


def test_every_part_of_a_mixture_has_its_reward_and_its_evaluations(run_folder: Path) -> None:
    with changed(run_folder) as lines:
        for step, line in enumerate(lines):
            line["batch"]["reward_by_domain"] = {"math": 0.25 + step / 16} | ({"code": 0.5} if step == 3 else {})
    parts = [{"math": {"mean": mean, "standard_error": 0.05, "n": 64}} for mean in (0.3, 0.6)]
    scores = (evaluation(version, 0.5) | {"domains": part} for version, part in zip((0, 12), parts, strict=True))
    replace_evaluations(run_folder, *scores)
    told = dict(facts(summarise(run_folder)))
    assert told["accuracy on math"] == (
        "0.300 ± 0.050 (n=64) of policy version 0, 0.600 ± 0.050 (n=64) of policy version 12"
    )
    assert told["reward on math"] == "0.250 at the first train step with it, 0.938 at the last one"
    assert told["reward on code"] == "0.500 at the first train step with it, 0.500 at the last one"


def test_masks_skipped_passes_and_the_factor_on_the_rate_are_summed_over_the_steps(run_folder: Path) -> None:
    plain = summarise(run_folder)
    assert (plain.masked_tokens, plain.skipped_trajectories, plain.mean_rate_factor) == ({}, 0, None)
    with changed(run_folder) as lines:
        for line in lines:
            line["batch"] |= {"masked_tokens": {"icepop": 2, "opsm": 0}, "skipped_trajectories": 3}
            line["rate_factor"] = 0.5
        lines[0]["rate_factor"] = 1.0
    summary = summarise(run_folder)
    assert summary.masked_tokens == {"icepop": 24} and summary.skipped_trajectories == 36
    assert summary.mean_rate_factor == pytest.approx((1 + 11 * 0.5) / 12)
    told = dict(facts(summary))
    assert told["masked tokens"] == "icepop 24" and told["trajectories without a pass"] == "36"


def test_a_run_that_learned_nothing_is_told_why(run_folder: Path) -> None:
    plain = summarise(run_folder)
    assert (plain.skipped_updates, plain.steps_of_equal_rewards, plain.unserved_after) == (0, 0, None)
    with changed(run_folder) as lines:
        for line in lines:
            line["batch"]["reward_std"] = 0.0
        lines[1]["skipped_updates"] = lines[2]["skipped_updates"] = 1
    with changed(run_folder, "timeline.jsonl") as samples:
        for generator in (generator for sample in samples for generator in sample["generators"]):
            generator["policy_version"] = 0
    bad = [sentence.text for sentence in sentences(summarise(run_folder)) if sentence.bad]
    assert any("No policy version after 0 was served" in text for text in bad), bad
    assert any("2 updates skipped, because the gradient was not finite" in text for text in bad), bad
    assert any("the verifier does not tell answers apart" in text for text in bad), bad
    file = run_folder / "config.yaml"
    settings = yaml.safe_load(file.read_text())
    settings["teachers"] = {"math": {"address": "teachers:7070"}}
    settings["trainer"]["algorithm"]["teacher"] = {"reverse_kl_coefficient": 1.0}
    file.write_text(yaml.safe_dump(settings))
    assert summarise(run_folder).steps_of_equal_rewards == 0, "it learns from teachers alone"


def test_domains_rounds_rollouts_and_replay_are_told_of(run_folder: Path) -> None:
    """Domains and rounds are those of the last step report."""
    plain = summarise(run_folder)
    assert (plain.domains, plain.replayed_share, plain.rollouts_per_group) == ({}, None, {8: 16 * 12})
    with changed(run_folder) as lines:
        for line in lines:
            line["batch"]["rollouts_per_group"]["histogram"] = {"8": 3, "32": 1}
            line["replayed_share"] = 0.5
        lines[-1]["mesh"] |= {
            "rounds_per_group": 1.25,
            "domains": {"algebra": {"drawn": 30, "completed": 200, "solved": 50, "tokens": 9000}},
        }
    told = dict(facts(summarise(run_folder)))
    assert told["rounds per group"] == "1.25" and told["trained groups by rollouts"] == "36 of 8, 12 of 32"
    assert told["replayed trajectories"] == "50.0%"
    expected = "30 groups drawn, 200 trajectories completed, 50 solved (25.0%), 9,000 tokens"
    assert told["domain algebra"] == expected


def test_groups_that_began_again_surplus_members_and_drops_by_length_are_told_of(run_folder: Path) -> None:
    """The counts are those of the last step report."""
    assert not any(word in words_of(run_folder) for word in ("decile", "began again", "surplus"))
    with changed(run_folder) as lines:
        lines[-1]["mesh"] |= {
            "totals": {"groups_set_aside_total": 5, "groups_restarted_total": 0},
            "trained_share_by_length_decile": [1.0, None, *[1.0] * 7, 0.75],
            "groups_begun_again_by_reason_and_length_decile": {"set_aside:3": 1, "set_aside:9": 4},
            "surplus_members_by_length_decile": [0, 3, *[0] * 7, 4],
            "wasted_tokens": {"surplus": 1234},
        }
    words = words_of(run_folder)
    shares = f"0%, none ended, {'0%, ' * 7}25%."
    assert f"Share of dropped groups by length decile, the shortest first: {shares}" in words
    assert "Groups that lost their tokens and began again: 5 set aside." in words
    assert "Groups set aside, by length decile of the longest member, the shortest first: 0, 0, 0, 1, 0, 0" in words
    assert "cut off as surplus, with 1,234 saved tokens" in words
    assert "the shortest first: 0, 3, 0, 0, 0, 0, 0, 0, 0, 4." in words


def test_a_gain_is_claimed_only_beyond_two_standard_errors(run_folder: Path) -> None:
    assert "a gain of 0.400" in words_of(run_folder)
    replace_evaluations(run_folder, evaluation(0, 0.40), evaluation(12, 0.46))
    assert "within noise" in words_of(run_folder)
    assert "gain" not in words_of(run_folder)
    replace_evaluations(run_folder, evaluation(12, 0.1), evaluation(0, 0.60), evaluation(12, 0.40))
    assert "a loss of 0.200" in words_of(run_folder), "the newest score of a version counts"


def test_a_single_sample_has_no_known_error_and_few_prompts_are_named_with_the_remedy(run_folder: Path) -> None:
    few = {"requested_prompts": 256, "existing_prompts": 1}
    before, after = (evaluation(version, 1.0, None) | {"n": 1} | few for version in (0, 12))
    replace_evaluations(run_folder, before, after)
    words = words_of(run_folder)
    assert "1.000 ± unknown (n=1, policy version 12)" in words and "the difference is not judged" in words
    assert "The evaluation split has 1 of evaluation.prompt_count=256 prompts: add rows, raise" in words


@pytest.mark.parametrize("of_base", [[], [{"policy_version": 0, "n": 0, "mean": 0.0, "discarded": 256}]])
def test_one_evaluation_with_answers_gives_no_gain(run_folder: Path, of_base: list[dict[str, Any]]) -> None:
    replace_evaluations(run_folder, *of_base, evaluation(12, 0.8))
    assert summarise(run_folder).gain is None
    assert "No gain can be stated" in words_of(run_folder)


def test_an_unfinished_run_says_so(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    folder = make_run(tmp_path / "run", steps=12)
    lines = (folder / "metrics.jsonl").read_text().splitlines()[:5]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert not summarise(folder).finished
    assert "not finished: 12 were planned" in words_of(folder)


def test_a_torn_last_line_is_reported_and_the_rest_is_used(run_folder: Path) -> None:
    with (run_folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"train_step": 13, "batch": {"outc')
    summary = summarise(run_folder)
    assert summary.train_steps == 12
    assert "metrics.jsonl: 1 unreadable line(s) skipped" in summary.missing


@pytest.mark.parametrize(
    ("source", "verifier", "name"),
    [
        ({"type": "jsonl", "path": "rows.jsonl"}, "composite", "mean reward"),
        ({"type": "jsonl", "path": "rows.jsonl"}, "exact", "accuracy"),
        ({"type": "reasoning_gym", "task": "chain_sum"}, "exact", "mean reward"),  # a task has its own verifier
    ],
)
def test_a_score_with_partial_credit_is_not_called_accuracy(
    run_folder: Path, source: dict[str, str], verifier: str, name: str
) -> None:
    config = yaml.safe_load((run_folder / "config.yaml").read_text())
    config["data"]["source"], config["reward"]["verifier"] = source, verifier
    (run_folder / "config.yaml").write_text(yaml.safe_dump(config))
    assert summarise(run_folder).score_name == name


def test_a_pipe_gets_every_sentence_on_one_line(run_folder: Path) -> None:
    out = io.StringIO()
    print_summary(summarise(run_folder), Console(file=out, width=80))
    assert max(map(len, out.getvalue().splitlines())) > 100 and "0.790" in out.getvalue()
    assert [line[0] for line in out.getvalue().splitlines() if "accuracy" in line.lower()][-1] == "-"


def audit_result(**changes: Any) -> AuditResult:
    known: dict[str, Any] = {"committed_step": 12, "batch_files": 12, "off_policy_token_share": 0.123, "green": True}
    return AuditResult(run="run", **{**known, **changes})


def test_a_file_that_is_no_audit_is_reported_not_raised(run_folder: Path) -> None:
    (run_folder / "audit.json").write_text('{"something": "else"}', encoding="utf-8")
    summary = summarise(run_folder)
    assert summary.audit is None
    assert any("not an audit result" in item for item in summary.missing)


def test_the_off_policy_share_is_that_of_the_loss_and_without_step_reports_that_of_the_audit(run_folder: Path) -> None:
    of_steps = summarise(run_folder).off_policy_share
    (run_folder / "audit.json").write_text(audit_result().to_json(), encoding="utf-8")
    assert summarise(run_folder).off_policy_share == of_steps != 0.123
    (run_folder / "metrics.jsonl").unlink()
    assert summarise(run_folder).off_policy_share == 0.123


def test_an_audit_of_an_earlier_part_of_the_run_is_shown_as_one_and_its_drops_are_not(run_folder: Path) -> None:
    with (run_folder / "timeline.jsonl").open("a", encoding="utf-8") as timeline:
        timeline.write(json.dumps({"t": START + 1000, "dropped": {"stale": 7}}) + "\n")
    for step, dropped in ((4, {"stale": 7}), (12, {"stale": 1})):
        audit = audit_result(committed_step=step, dropped={"stale": 1})
        (run_folder / "audit.json").write_text(audit.to_json(), encoding="utf-8")
        summary = summarise(run_folder)
        assert summary.dropped == dropped
        shown = [dict(facts(summary))["audit"], dict(ending(RecordedRun(run_folder)))["audit"].partition(":")[0]]
        bad = [sentence.text for sentence in sentences(summary) if sentence.bad]
        if step == 4:
            assert shown == ["green, up to train step 4 of 12", "audit green up to train step 4 of 12"]
            assert any("have not been audited: continue the run, or run" in text for text in bad)
        else:
            assert (shown, bad) == (["green", "audit green"], [])


def test_an_audit_that_is_not_green_is_marked_bad_with_its_problems(run_folder: Path) -> None:
    result = audit_result(green=False, problems=("2 groups are lost",), lost=("e0-7", "e0-9"))
    (run_folder / "audit.json").write_text(result.to_json(), encoding="utf-8")
    bad = [s.text for s in sentences(summarise(run_folder)) if s.bad]
    assert bad[-1] == "2 groups are lost" and "NOT green" in bad[-2] and "lost 2" in bad[-2]


def test_durations_read_naturally() -> None:
    assert [duration(seconds) for seconds in (None, 8.4, 59.7, 7500)] == [None, "8 s", "1 min 00 s", "2 h 05 min"]
