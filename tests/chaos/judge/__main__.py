"""``python -m tests.chaos.judge RUN_FOLDER [BUCKET_COPY]``: print the judgement; exit status 1 with problems."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from . import judge

if __name__ == "__main__":
    judgement = judge(Path(sys.argv[1]), checkpoints=Path(sys.argv[2]) if len(sys.argv) > 2 else None)
    print(json.dumps(asdict(judgement), indent=2))
    sys.exit(not judgement.sound)
