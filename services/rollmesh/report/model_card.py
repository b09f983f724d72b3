"""Model card of an exported policy: run, train step, evaluation, data, and the digest of the resolved run file."""

from __future__ import annotations

import json

from rollmesh.checkpoints.manifest import Manifest
from rollmesh.config.data import DataConfig, PromptSourceConfig
from rollmesh.report.formats import plus_minus
from rollmesh.report.recorded_run import RecordedRun
from rollmesh.report.series import EvaluationPoint
from rollmesh.report.summary import RunSummary, summarise

CARD_FILE = "README.md"

_HEADER = """---
library_name: transformers
pipeline_tag: text-generation
tags: [reinforcement-learning, rollmesh]
---
"""


def model_card(run: RecordedRun, manifest: Manifest, config_digest: str) -> str:
    """Return the card as Markdown; facts that the run folder does not record are said to be missing."""
    summary = summarise(run)
    rows = [
        ("Run", summary.name),
        ("Train step", f"{manifest.train_step}{_planned(summary)}"),
        ("Policy version", f"{manifest.policy_version}"),
        ("Initial model", _UNKNOWN if run.config is None else f"`{run.config.model.path}`"),
        ("Evaluation of this version", _score(summary, manifest.policy_version)),
        ("Evaluation before training", _score(summary, 0)),
        ("Data", _UNKNOWN if run.config is None else _data(run.config.data.source)),
        ("Chat template (`chat_template_kwargs`)", _UNKNOWN if run.config is None else _chat_template(run.config.data)),
        ("Verifier", _UNKNOWN if run.config is None else f"`{run.config.reward.verifier}`"),
        ("Schedule", summary.preset or _UNKNOWN),
        ("Parameters", f"{manifest.parameter_count:,} ({manifest.dtype})"),
        ("Written", f"{manifest.create_time:%Y-%m-%d %H:%M} UTC"),
        ("Audit", summary.audit_verdict or _UNKNOWN),
        ("Digest of the resolved run file", f"sha256 `{config_digest}`"),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    return f"{_HEADER}\n# {summary.name}, train step {manifest.train_step}\n\n| | |\n|---|---|\n{table}\n\n{_USE}"


_UNKNOWN = "not recorded"
_USE = """```python
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

model = AutoModelForCausalLM.from_pretrained(".")
# AutoTokenizer may choose the tokenizer of the architecture instead of the one in tokenizer.json.
tokenizer = PreTrainedTokenizerFast.from_pretrained(".")
```
"""


def _planned(summary: RunSummary) -> str:
    return "" if summary.planned_steps is None else f" of {summary.planned_steps}"


def _score(summary: RunSummary, version: int) -> str:
    points: dict[int, EvaluationPoint] = {point.policy_version: point for point in summary.evaluations}
    point = points.get(version)
    if point is None:
        return _UNKNOWN
    return f"{summary.score_name} {point.mean:.3f} {plus_minus(point.standard_error)} (n={point.n})"


def _data(source: PromptSourceConfig) -> str:
    fields = source.model_dump(mode="json", exclude_defaults=True, exclude={"type"})
    return f"`{source.type}` {json.dumps(fields)}" if fields else f"`{source.type}`"


def _chat_template(data: DataConfig) -> str:
    variables = data.chat_template_kwargs
    return f"`{json.dumps(variables)}`" if variables else "no variables"
