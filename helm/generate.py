"""Write the derived files of the chart: README, values schema, rules of prometheus-adapter, bounds of the schedules.

    python helm/generate.py            write the files
    python helm/generate.py --check    list the files that are out of date (exit 1)

Every value has a comment above it that begins with its name; the schema allows no other keys.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import yaml
from chart_schema import schema_of

from rollmesh.scheduling.presets import PRESETS

CHART = Path(__file__).resolve().parent / "rollmesh"
_KEY = re.compile(r"^(?P<indent> *)(?P<key>[A-Za-z0-9_]+):(?P<rest>.*)$")


class ValuesError(Exception):
    """values.yaml breaks one of its rules; the text names the place."""


def documented_values(text: str) -> dict[str, str]:
    """Return the comment of every value by its path, sections included; raises ValuesError for one without."""
    found = dict(_commented_keys(text))
    for path, comment in found.items():
        name = path.rpartition(".")[2]
        if not comment.startswith(name + " "):
            raise ValuesError(f"values.yaml: {path}: its comment must begin with {name!r}, not {comment[:40]!r}")
    return found


def _commented_keys(text: str) -> Iterator[tuple[str, str]]:
    """(path, comment above) of every mapping key outside of lists."""
    comment: list[str] = []
    parents: list[tuple[int, str]] = []
    list_indent: int | None = None
    for line in text.splitlines():
        stripped = line.strip()
        indent = len(line) - len(line.lstrip())
        if not stripped:
            comment, list_indent = [], None
        elif stripped.startswith("#"):
            comment.append(stripped.lstrip("# "))
        elif stripped.startswith("- "):
            comment, list_indent = [], indent
        elif list_indent is None or indent <= list_indent:
            list_indent = None
            match = _KEY.match(line)
            if match is None:
                raise ValuesError(f"values.yaml: cannot read the line {line!r}")
            while parents and parents[-1][0] >= indent:
                parents.pop()
            parents.append((indent, match["key"]))
            yield ".".join(key for _, key in parents), " ".join(comment)
            comment = []


def readme(values: dict[str, Any], comments: dict[str, str], chart: dict[str, Any]) -> str:
    """Return the chart's README: the template with the table of values."""
    rows = ["| value | default | meaning |", "|---|---|---|"]
    for path, comment in comments.items():
        default = reduce(getitem, path.split("."), values)
        shown = "" if isinstance(default, dict) and default else f"`{json.dumps(default)}` "
        meaning = comment.replace("|", "\\|")
        rows.append(f"| {path if shown else f'**{path}**'} | {shown}| {meaning} |")
    template = (CHART / "README.md.tmpl").read_text(encoding="utf-8")
    return (
        template.replace("@VALUES@", "\n".join(rows))
        .replace("@VERSION@", chart["version"])
        .replace("@KUBE@", chart["kubeVersion"].removesuffix("-0"))
    )


def adapter_rules() -> str:
    """Values of the prometheus-adapter chart: an external metric for every signal of files/autoscaling."""
    rules = []
    for file in sorted((CHART / "files" / "autoscaling").glob("*.yaml")):
        rule = yaml.safe_load(file.read_text(encoding="utf-8"))
        for signal in rule["signals"]:
            query = signal["query"].replace("$selector", "<<.LabelMatchers>>").replace("$window", rule["window"])
            rules.append(
                {
                    # The leader's series exists as long as the run does, independent of the query.
                    "seriesQuery": 'rollmesh_rollout_leader{namespace!="",run!=""}',
                    "resources": {"overrides": {"namespace": {"resource": "namespace"}}},
                    "name": {"as": metric_name(rule["service"], signal["name"])},
                    "metricsQuery": query,
                }
            )
    head = "# Made by helm/generate.py from files/autoscaling. Values for the prometheus-adapter chart.\n"
    return head + yaml.safe_dump({"rules": {"external": rules}}, sort_keys=False, width=116)


def schedule_bounds() -> str:
    """Return the staleness bound of every preset, from which the chart computes flags of SGLang sidecars."""
    bounds = {
        name: {"max_staleness": preset.max_staleness, "staleness_follows_window": preset.staleness_follows_window}
        for name, preset in PRESETS.items()
    }
    return "# Made by helm/generate.py from the presets of schedules.\n" + yaml.safe_dump(bounds)


def metric_name(service: str, signal: str) -> str:
    """Name of the external metric of a signal, as the HorizontalPodAutoscalers ask for it."""
    return f"rollmesh_{service}_{signal}".replace("-", "_")


def outputs() -> dict[Path, str]:
    """Every generated file and what belongs in it."""
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    values, comments = yaml.safe_load(text), documented_values(text)
    return {
        CHART / "README.md": readme(values, comments, chart),
        CHART / "values.schema.json": json.dumps(schema_of(values, comments), separators=(",", ":")) + "\n",
        CHART / "files" / "prometheus-adapter" / "rules.yaml": adapter_rules(),
        CHART / "files" / "schedules.yaml": schedule_bounds(),
    }


def main() -> int:
    """Exit status: 1 when a file is out of date under --check."""
    parser = argparse.ArgumentParser(description="Write what follows from the chart's values.yaml.")
    parser.add_argument("--check", action="store_true", help="write nothing; list the files that are out of date")
    check = parser.parse_args().check
    stale = []
    for file, content in outputs().items():
        if not file.exists() or file.read_text(encoding="utf-8") != content:
            stale.append(file.relative_to(CHART.parent))
            if not check:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(content, encoding="utf-8")
    for file in stale:
        print(f"{'out of date' if check else 'written'}: helm/{file}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
