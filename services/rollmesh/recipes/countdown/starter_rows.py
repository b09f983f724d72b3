"""Rows of the data file that ``rollmesh init`` writes."""

from __future__ import annotations

import json
import random

from rollmesh.tasks.countdown import draw_puzzle

ROW_COUNT = 2_048
_SEED = 20_260_101


def starter_rows() -> str:
    """Return distinct puzzles as JSON lines; the same ones on every machine."""
    rng = random.Random(_SEED)
    rows: dict[str, str] = {}
    while len(rows) < ROW_COUNT:
        puzzle = draw_puzzle(rng, "train", 5, 8)
        row = {"prompt": puzzle.text, "answer": puzzle.target, "numbers": list(puzzle.numbers)}
        rows[puzzle.text] = json.dumps(row)
    return "".join(f"{row}\n" for row in rows.values())
