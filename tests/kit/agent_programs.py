"""The programs and the run file of docs/bring-your-agent.md, as files, for the small model of the tool task."""

import re
import shutil
from pathlib import Path
from typing import Any

import yaml

from .tool_task import write_tasks

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "bring-your-agent.md"
RUN_BY = "tests/e2e/agents/test_agents_of_others.py"


def page_programs() -> dict[str, str]:
    """The blocks of the page, word for word, by the name of their file."""
    return dict(re.findall(rf"<!-- run by {RUN_BY}: (\S+) -->\n```\w+\n(.*?)```", PAGE.read_text(), re.S))


def write_page_run(folder: Path, model: Path) -> dict[str, Any]:
    """Write the programs and the tasks; return the page's run file with this model, at a port that is yet to be set."""
    for name, text in page_programs().items():
        (folder / name).write_text(text)
    shutil.copy(ROOT / "examples" / "run_agent.py", folder)
    data: dict[str, Any] = yaml.safe_load((folder / "run.yaml").read_text())
    data["data"]["source"]["path"] = str(write_tasks(folder / "tasks.jsonl"))
    # The small tokenizer is one of the family, without the family's template.
    data["agents"]["renderer"] = "qwen3"
    return {**data, "model": {"path": str(model)}}


def write_environment_run(folder: Path, model: Path, url: str) -> dict[str, Any]:
    """Write the rows of the page's run in an OpenEnv environment, and return its run file."""
    data = write_page_run(folder, model)
    rollout = yaml.safe_load((folder / "openenv.yaml").read_text())["rollout"]
    rollout["environment_options"]["url"] = url
    rows = folder / "rows.jsonl"
    rows.write_text('{"prompt": "<|im_start|>system\\n", "answer": ""}\n' * 192)
    return {**data, "rollout": rollout, "data": {**data["data"], "source": {"type": "jsonl", "path": str(rows)}}}
