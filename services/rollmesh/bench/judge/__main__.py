"""``python -m rollmesh.bench.judge RUN_FOLDER``: print the judgement; exit status 1 if there are problems."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from rollmesh.bench.judge import judge

if __name__ == "__main__":
    judgement = judge(Path(sys.argv[1]))
    print(json.dumps(asdict(judgement), indent=2))
    sys.exit(not judgement.sound)
