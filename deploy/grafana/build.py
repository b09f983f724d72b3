"""Write the dashboards of the chart: ``python deploy/grafana/build.py [--check]``.

With ``--check`` nothing is written; exit status 1 names the files that are not what this code makes.
"""

import json
import sys
from pathlib import Path
from typing import Any

from dashboards import agents, gateway, generation, infrastructure, overview, queue, rewards, training, weights
from grafana_foundation_sdk.cog.encoder import JSONEncoder

FOLDER = Path(__file__).parents[2] / "helm" / "rollmesh" / "files" / "dashboards"
_MODULES = (overview, generation, queue, training, rewards, weights, infrastructure, gateway, agents)
PAGES = [module.PAGE for module in _MODULES]


def rendered() -> dict[Path, str]:
    """Text of every dashboard file."""
    files = {}
    for page in PAGES:
        data = json.loads(json.dumps(page.build(), cls=JSONEncoder))
        files[FOLDER / f"{page.name}.json"] = json.dumps(tidied(data), separators=(",", ":"), sort_keys=True) + "\n"
    return files


def tidied(dashboard: dict[str, Any]) -> dict[str, Any]:
    """Remove the fields that the SDK writes for old versions of Grafana and that current types no longer have."""
    dashboard.pop("style", None)
    for variable in dashboard["templating"]["list"]:
        for key in ("auto", "auto_count", "auto_min", "id"):
            variable.pop(key, None)
    for panel in dashboard["panels"]:
        options = panel.get("options") or {}
        options.pop("footer", None)
        options.get("tooltip", {}).pop("show", None)
    return dashboard


def main(arguments: list[str]) -> int:
    """Write, or compare."""
    files = rendered()
    stale = [file for file, text in files.items() if not file.exists() or file.read_text() != text]
    unknown = sorted(set(FOLDER.glob("*.json")) - set(files))
    if arguments == ["--check"]:
        for file in (*stale, *unknown):
            print(f"{file.name} is not what deploy/grafana makes; run: python deploy/grafana/build.py")
        return 1 if stale or unknown else 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    for file in stale:
        file.write_text(files[file])
        print(f"wrote {file.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
