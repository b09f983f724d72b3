"""Write the dashboards of the chart: ``python deploy/grafana/build.py [--check]``.

With ``--check`` nothing is written; exit status 1 names the files that are not what this code makes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from dashboards import generation, infrastructure, overview, queue, rewards, training, weights
from grafana_foundation_sdk.cog.encoder import JSONEncoder

FOLDER = Path(__file__).parents[2] / "helm" / "rollmesh" / "files" / "dashboards"
PAGES = (overview, generation, queue, training, rewards, weights, infrastructure)


def rendered() -> dict[Path, str]:
    """Text of every dashboard file."""
    return {
        FOLDER / f"{page.NAME}.json": json.dumps(page.build(), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"
        for page in PAGES
    }


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
