"""docs/monitoring.md lists every recording rule, alert and dashboard, and its scrape configuration is one."""

import re
import subprocess
from pathlib import Path

from ..grafana.dashboard_files import FILES, load
from .rule_files import ROOT, alerts, code_blocks, recorded

TEXT = (ROOT / "docs" / "monitoring.md").read_text()


def test_every_recording_rule_is_explained() -> None:
    assert set(re.findall(r"^\| `(run:\w+:\w+)` \|", TEXT, re.MULTILINE)) == set(recorded())


def test_every_alert_is_listed_with_its_severity_and_hold() -> None:
    listed = re.findall(r"^\| \[(\w+)\]\(runbooks/\w+\.md#\w+\) \| (\w+) \| (\w+) \|", TEXT, re.MULTILINE)
    assert {name: (severity, hold) for name, severity, hold in listed} == {
        name: (rule["labels"]["severity"], rule["for"]) for name, rule in alerts().items()
    }


def test_every_dashboard_is_listed() -> None:
    for file in FILES:
        assert f"| {load(file)['title'].removeprefix('rollmesh: ')} |" in TEXT


def test_the_documented_and_the_shipped_configuration_are_valid(promtool: str, tmp_path: Path) -> None:
    (documented,) = [block for block in code_blocks(TEXT) if "scrape_configs" in block]
    for number, text in enumerate((documented, (ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())):
        rules = str(ROOT / "helm" / "rollmesh" / "files" / "prometheus")
        text = text.replace("helm/rollmesh/files/prometheus", rules).replace("/etc/prometheus/rules", rules)
        file = tmp_path / f"{number}.yml"
        file.write_text(text)
        done = subprocess.run(
            [promtool, "check", "config", file], capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "SUCCESS: 2 rule files found" in done.stdout or done.stdout.count("rules found") == 2, done.stdout
