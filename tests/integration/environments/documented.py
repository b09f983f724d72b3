"""Run files of docs/environments.md."""

import re
from pathlib import Path

import yaml

from rollmesh.config.rollout import RolloutConfig

PAGE = Path(__file__).parents[3] / "docs" / "environments.md"


def documented(name):
    """The options of each environment of this name, in order."""
    blocks = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    sections = [RolloutConfig.model_validate(yaml.safe_load(block)["rollout"]) for block in blocks]
    return [section.environment_options for section in sections if section.environment == name]
