"""promtool checks the shipped rules, and every alert fires and stays silent in a test."""

import os
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from .rule_files import (
    ALERTS,
    RECORDING,
    RULE_TESTS,
    alerts,
    asked_values,
    exported_values,
    read_series,
    recorded,
    rules,
    unknown_series,
)

HEALTHY = next(file for file in RULE_TESTS if file.name == "healthy_test.yaml")
METRIC = re.compile(r"^([a-z_]+)\{")
_PROMTOOL_SECONDS = 600
"""The longest file takes sixteen seconds of a processor, of which a busy machine may give one in ten."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(_PROMTOOL_SECONDS + 100)]


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in command]
    # At its default the collector of Go takes a quarter of promtool's CPU time; it frees little.
    variables = os.environ | {"GOGC": "400"}
    return subprocess.run(words, capture_output=True, text=True, timeout=_PROMTOOL_SECONDS, check=False, env=variables)


def alert_tests(file: Path) -> list[dict[str, Any]]:
    return [case for group in yaml.safe_load(file.read_text())["tests"] for case in group["alert_rule_test"]]


def test_promtool_finds_nothing_wrong_with_the_rules(promtool: str) -> None:
    done = run(promtool, "check", "rules", "--lint=all", "--lint-fatal", RECORDING, ALERTS)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("file", RULE_TESTS, ids=lambda file: file.stem)
def test_the_rules_say_what_their_tests_expect(promtool: str, file: Path) -> None:
    done = run(promtool, "test", "rules", file)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_fires_in_a_test_and_stays_silent_in_another() -> None:
    fired: Counter[str] = Counter()
    silent: Counter[str] = Counter()
    for file in RULE_TESTS:
        if file != HEALTHY:
            for case in alert_tests(file):
                (fired if case["exp_alerts"] else silent)[case["alertname"]] += 1
    names = set(alerts())
    print(
        f"{len(names)} alerts: {sum(fired.values())} tests in which one fires, {sum(silent.values())} in which it could"
    )
    assert not names - set(fired), "no test in which they fire"
    assert not names - set(silent), "no test in which they stay silent"


def test_no_alert_fires_in_a_healthy_mesh_and_nothing_that_a_rule_reads_is_missing_there() -> None:
    """An alert whose series are missing would be silent for the wrong reason."""
    asked = {case["alertname"] for case in alert_tests(HEALTHY) if not case["exp_alerts"]}
    assert asked == set(alerts())
    (mesh,) = yaml.safe_load(HEALTHY.read_text())["tests"]
    there = {METRIC.match(one["series"]).group(1) for one in mesh["input_series"]} | set(recorded())  # type: ignore[union-attr]
    for rule in rules(RECORDING) + rules(ALERTS):
        missing = {name for name in read_series(rule["expr"]) if not any(re.fullmatch(name, one) for one in there)}
        assert not missing, rule


@pytest.mark.parametrize("labels", ['run="other-{}"', 'run="demo",namespace="other-{}"'])
def test_a_healthy_run_is_not_mistaken_for_another_one_on_the_same_prometheus(
    promtool: str, tmp_path: Path, labels: str
) -> None:
    """The healthy mesh beside three whose series never change: no rule's value differs, and only the others are ill."""
    document = yaml.safe_load(HEALTHY.read_text().replace("../../../../helm", str(RECORDING.parents[3])))
    (mesh,) = document["tests"]
    healthy = [one["series"] for one in mesh["input_series"]]
    for case in mesh["promql_expr_test"]:
        case["expr"] = re.sub(r"(run:\w+:\w+)(?:\{(.*?)\})?", r'\1{run="demo",namespace="",\2}', case["expr"])
    del mesh["alert_rule_test"]
    silence = {"expr": 'ALERTS{run="demo",namespace=""}', "eval_time": "3h", "exp_samples": []}
    mesh["promql_expr_test"].append(silence)
    for value in (0, 1, 9999):
        other = labels.format(value)
        mesh["input_series"] += [
            {"series": series.replace('run="demo"', other), "values": f"{value}x200"} for series in healthy
        ]
        alarm = {
            "expr": f'count(ALERTS{{{other},alertstate="firing"}}) > bool 0',
            "eval_time": "3h",
            "exp_samples": [{"labels": "{}", "value": 1}],
        }
        mesh["promql_expr_test"].append(alarm)
    file = tmp_path / "four_runs_test.yaml"
    file.write_text(yaml.safe_dump(document))
    done = run(promtool, "test", "rules", file)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_recording_rule_is_computed_in_the_healthy_mesh() -> None:
    (mesh,) = yaml.safe_load(HEALTHY.read_text())["tests"]
    checked = {name for case in mesh["promql_expr_test"] for name in read_series(case["expr"])}
    assert checked == set(recorded())


def test_rules_read_only_exported_metrics() -> None:
    for rule in rules(RECORDING) + rules(ALERTS):
        assert not unknown_series(rule["expr"]), rule


def test_rules_compare_labels_with_exported_values() -> None:
    """A misspelt reason matches nothing, or everything, and no series is missing."""
    exported = exported_values()
    asked = {pair for rule in rules(RECORDING) + rules(ALERTS) for pair in asked_values(rule["expr"])}
    compared = {(label, value) for label, value in asked if label not in ("run", "__name__")}
    assert len(compared) > 15
    wrong = {(label, value) for label, value in compared if value not in exported.get(label, set())}
    assert not wrong


def test_recorded_names_say_level_metric_and_operations() -> None:
    for name in recorded():
        assert re.fullmatch(r"run:rollmesh_[a-z_]+:(sum|max|min|ratio|rate\d+m|(mean|ratio)_rate\d+m)", name), name


def test_every_alert_says_what_to_do_about_it() -> None:
    for name, rule in alerts().items():
        assert re.fullmatch(r"([A-Z][a-z]+)+", name)
        assert rule["for"]
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
        assert rule["annotations"]["runbook_url"].partition("#")[2] == name.lower()
        assert "$labels.run" in rule["annotations"]["summary"]
