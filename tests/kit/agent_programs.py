"""The programs and the run file of docs/bring-your-agent.md, as files, for the small model of the tool task."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from .tool_task import write_tasks

PAGE = Path(__file__).parents[2] / "docs" / "bring-your-agent.md"
RUN_BY = "tests/e2e/agents/test_agents_of_others.py"


def page_programs() -> dict[str, str]:
    """The blocks of the page, word for word, by the name of their file."""
    return dict(re.findall(rf"<!-- run by {RUN_BY}: (\S+) -->\n```\w+\n(.*?)```", PAGE.read_text(), re.S))


def write_page_run(folder: Path, model: Path) -> dict[str, Any]:
    """Write the programs and the tasks; return the page's run file with this model, at a port that is yet to be set."""
    for name, text in page_programs().items():
        (folder / name).write_text(text)
    data: dict[str, Any] = yaml.safe_load((folder / "run.yaml").read_text())
    data["data"]["source"]["path"] = str(write_tasks(folder / "tasks.jsonl"))
    # The small tokenizer is one of the family, without the family's template.
    data["agents"]["renderer"] = "qwen3"
    return {**data, "model": {"path": str(model)}}
