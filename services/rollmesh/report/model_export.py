"""Trained model of a run: where it is, and a copy as a plain Hugging Face folder with a model card.

It reads published policies and the records of the run folder, never Redis, so a run of last week can be exported.
"""

import contextlib
import hashlib
import json
import shutil
import uuid
from pathlib import Path

from rollmesh.checkpoints.bucket import BucketStore
from rollmesh.checkpoints.describe import ADAPTER_CONFIG_FILE
from rollmesh.checkpoints.manifest import Manifest
from rollmesh.checkpoints.policies import VerifiedPolicy
from rollmesh.config.data import DataConfig, PromptSourceConfig
from rollmesh.config.recipes import resolve_model
from rollmesh.errors import ConfigError, DataError
from rollmesh.file_writes import write_text
from rollmesh.report.audit import open_checkpoints
from rollmesh.report.console import plus_minus
from rollmesh.report.recorded_run import RecordedRun
from rollmesh.report.summary import RunSummary, summarise
from rollmesh.types import PolicyRecord

_SAMPLING_FILE = "generation_config.json"
CARD_FILE = "README.md"


def export_model(run_folder: Path, out: Path, version: int | None = None) -> Manifest:
    """Copy a policy (None: the newest) with a model card into the new folder ``out``, atomically; return its manifest.

    An adapter is merged into its base: the folder has full weights. Every byte is verified before it is copied. Raises
    ConfigError when ``out`` exists or the version is not there, DataError or CheckpointError for a run without
    policies.
    """
    if out.exists() or out.is_symlink():
        raise ConfigError(f"OUT={out}: exists already; name a new folder, or delete this one")
    run = RecordedRun(run_folder)
    policy = open_checkpoints(run).open(published_record(run, version))
    temporary = out.absolute().with_name(f".{out.name}-{uuid.uuid4().hex}.tmp")
    try:
        temporary.mkdir(parents=True)
        _fill(temporary, run, policy)
        temporary.rename(out)
    except OSError as error:
        raise ConfigError(f"OUT={out}: cannot be written: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return policy.manifest


def trained_model_lines(run_folder: Path) -> list[str]:
    """Tell where the newest policy of a run is and how it is loaded; empty for a run without a policy."""
    run = RecordedRun(run_folder)
    store = open_checkpoints(run)
    newest = store.newest_policy()
    if newest is None:
        return []
    export = f"rollmesh export {run_folder} OUT"
    if isinstance(store, BucketStore):
        place = f"{store.objects.url}/{newest.path}"
        return [f"trained model: {place} (policy version {newest.policy_version})", f"to download it: {export}"]
    folder = store.root / newest.path
    if (folder / ADAPTER_CONFIG_FILE).is_file():
        full_record = store.complete_policies(announced_only=True)[0]
        adapter, full = _weight_bytes(folder), _weight_bytes(store.root / full_record.path)
        return [
            f"trained adapter: {folder} (policy version {newest.policy_version}), in PEFT form above policy version 0",
            f"a version has {adapter:,} bytes of weights, full weights have {full:,} ({full / adapter:.1f} times)",
            f"to write the full model, with a model card: {export}",
        ]
    return [
        f"trained model: {folder} (policy version {newest.policy_version})",
        f'to load it: transformers.AutoModelForCausalLM.from_pretrained("{folder}")',
        f"to copy it with a model card: {export}",
    ]


def _weight_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def published_record(run: RecordedRun, version: int | None) -> PolicyRecord:
    """Return the policy of this version (None: the newest) from the checkpoints of a run.

    Raises ConfigError for a version that is not there, DataError for a run without a policy, CheckpointError if the
    newest one is asked for and damaged.
    """
    store = open_checkpoints(run)
    newest = store.newest_policy() if version is None else None
    if newest is not None:
        return newest
    records = {r.policy_version: r for r in store.complete_policies(announced_only=True)}
    if not records:
        raise DataError(f"{run.path}: the run has published no policy yet; start it with rollmesh up")
    if version not in records:
        damaged = "".join(f"; {policy.reason}" for policy in store.unsound_policies() if policy.announced)
        raise ConfigError(
            f"--version {version}: not in the checkpoints, which keep the versions {', '.join(map(str, records))}; "
            f"older ones were pruned (checkpoints.keep_last){damaged}"
        )
    return records[version]


def _fill(folder: Path, run: RecordedRun, policy: VerifiedPolicy) -> None:
    manifest = policy.manifest
    if policy.base is None:
        for file in manifest.files:
            target = folder / file.path
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(policy.folder / file.path, target)
    else:
        from rollmesh.trainer.learner.policy_scorer import write_merged_policy

        write_merged_policy(policy, folder)
        full = policy.base.manifest
        manifest = manifest.model_copy(update={"parameter_count": full.parameter_count, "dtype": full.dtype})
    if run.config is not None and not (folder / _SAMPLING_FILE).exists():
        # The end tokens and sampling defaults of the initial model; if that was moved, the policy is complete without.
        with contextlib.suppress(ConfigError, FileNotFoundError):
            shutil.copyfile(resolve_model(run.config.model.path) / _SAMPLING_FILE, folder / _SAMPLING_FILE)
    digest = hashlib.sha256((run.config_text or "").encode()).hexdigest()
    write_text(folder / CARD_FILE, model_card(run, manifest, digest))


_HEADER = """---
library_name: transformers
pipeline_tag: text-generation
tags: [reinforcement-learning, rollmesh]
---
"""


def model_card(run: RecordedRun, manifest: Manifest, config_digest: str) -> str:
    """Return the card as Markdown; facts that the run folder does not record are said to be missing."""
    summary, config = summarise(run), run.config
    planned = "" if summary.planned_steps is None else f" of {summary.planned_steps}"
    rows = [
        ("Run", summary.name),
        ("Train step", f"{manifest.train_step}{planned}"),
        ("Policy version", f"{manifest.policy_version}"),
        ("Initial model", _UNKNOWN if config is None else f"`{config.model.path}`"),
        ("Evaluation of this version", _score(summary, manifest.policy_version)),
        ("Evaluation before training", _score(summary, 0)),
        ("Data", _UNKNOWN if config is None else _data(config.data.source)),
        ("Chat template (`chat_template_kwargs`)", _UNKNOWN if config is None else _chat_template(config.data)),
        ("Verifier", _UNKNOWN if config is None else f"`{config.reward.verifier}`"),
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


def _score(summary: RunSummary, version: int) -> str:
    point = {point.policy_version: point for point in summary.evaluations}.get(version)
    if point is None:
        return _UNKNOWN
    return f"{summary.score_name} {point.mean:.3f} {plus_minus(point.standard_error)} (n={point.n})"


def _data(source: PromptSourceConfig) -> str:
    fields = source.model_dump(mode="json", exclude_defaults=True, exclude={"type"})
    return f"`{source.type}` {json.dumps(fields)}" if fields else f"`{source.type}`"


def _chat_template(data: DataConfig) -> str:
    variables = data.chat_template_kwargs
    return f"`{json.dumps(variables)}`" if variables else "no variables"
