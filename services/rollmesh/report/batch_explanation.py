"""``rollmesh explain``: policy version, ratio, weight, and reason for masking or clipping of every token of a batch.

The numbers are those of ``PolicyTrainer.explain`` with the weights at the start of the train step, read from the
checkpoint store. Training used other numbers where it had recorded data that is not kept, or had already updated the
weights; the notes list these cases.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.policies import VerifiedPolicy
from rollmesh.config import RunConfig
from rollmesh.config.loss_methods import MASKS, OWN_MASK
from rollmesh.config.trainer import TrainerConfig
from rollmesh.errors import CheckpointError, ConfigError, DataError
from rollmesh.report.audit import known_train_steps, open_checkpoints
from rollmesh.report.console import listed, print_line
from rollmesh.report.recorded_run import RecordedRun
from rollmesh.types import Batch, PolicyRecord, Trajectory

if TYPE_CHECKING:
    from rich.console import Console

    from rollmesh.trainer.learner.token_explanation import TokenExplanation

# Tokens with another reason are clipped.
_REASON_STYLES: Mapping[str, str] = {
    "trained": "",
    "zero_advantage": "dim",
    "environment": "dim",
    "stale": "yellow",
    "weight_truncated": "yellow",
    **dict.fromkeys((*MASKS.methods, OWN_MASK), "yellow"),
}
_FALLBACK_MARK = "~"
_OF_TEACHER = ("advantage", "teacher")
_NOT_AS_TRAINED: Mapping[str, str] = {
    "stage_not_recorded": (
        "the logprobs that the trainer recorded at the end of their stages are not kept, so old, ratio, weight and "
        "result differ from those of the training"
    ),
    "version_not_kept": (
        "the weights of their versions are pruned by now; if the training still had them, its old, ratio, weight and "
        "result are different"
    ),
    "average_not_kept": (
        "the average of the weights is kept for the next step only, so old, ratio, weight and result differ from those "
        "of the training"
    ),
    "mixed_cache": "no weights reproduce tokens that attended to another version's cache; the training did the same",
}
"""Explanations of the fallbacks of the old logprob, for the notes."""


class ExplainedTrajectory(NamedTuple):
    """One trajectory of a batch, token by token, with the text of each token."""

    trajectory: Trajectory
    prompt: str
    response: str
    tokens: "tuple[TokenExplanation, ...]"
    texts: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """Return the trajectory for JSON."""
        trajectory = self.trajectory
        return {
            "trajectory_id": trajectory.trajectory_id,
            "group_id": trajectory.group_id,
            "reward": None if trajectory.outcome is None else trajectory.outcome.verdict,
            "shaped_reward": trajectory.shaped_reward,
            "domain": trajectory.prompt.domain,
            "cut_token_count": trajectory.cut_token_count,
            "prompt": self.prompt,
            "response": self.response,
            "tokens": [{"text": t} | asdict(e) for t, e in zip(self.texts, self.tokens, strict=True)],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedBatch:
    """Explained trajectories of one batch, with notes on differences from the training."""

    old_logprobs: str
    """Source of old logprobs of the run."""
    minibatches: int
    fallbacks: Mapping[str, int]
    """Tokens of the whole batch whose old logprob falls back to the sampler's, by reason."""
    notes: tuple[str, ...]
    """Possible differences from the numbers of the training, one sentence each; empty without differences."""
    trajectories: tuple[ExplainedTrajectory, ...]


def explain_batch(
    run_folder: Path,
    train_step: int,
    *,
    trajectory_id: str | None = None,
    limit: int = 1,
    as_json: bool = False,
    console: "Console",
) -> None:
    """Print the explanation of one trajectory of a batch, or of the first ``limit``.

    Raises DataError for a missing batch or trajectory, and for a step whose weights are pruned.
    """
    explained = explained_batch(run_folder, train_step, trajectory_id=trajectory_id, limit=limit)
    if as_json:
        document = {
            "train_step": train_step,
            "old_logprobs": explained.old_logprobs,
            "old_logprob_fallbacks": dict(explained.fallbacks),
            "minibatches": explained.minibatches,
            "notes": explained.notes,
            "trajectories": [trajectory.document() for trajectory in explained.trajectories],
        }
        console.file.write(f"{json.dumps(document, indent=2)}\n")
        return
    for trajectory in explained.trajectories:
        print_explanation(trajectory, console)
    for note in explained.notes:
        print_line(console, f"note: {note}", style="yellow")


def explained_batch(
    run_folder: Path, train_step: int, *, trajectory_id: str | None = None, limit: int = 1
) -> ExplainedBatch:
    """Explain one trajectory of a batch, or its first ``limit``; raises the errors of ``explain_batch``."""
    from rollmesh.trainer.service.run_log import decoder

    folder = RecordedRun(run_folder)
    store = open_checkpoints(folder)
    batch = _batch(store, train_step)
    chosen = _chosen(batch, trajectory_id, limit)
    policy = store.open(_weights_before(store, train_step))
    if folder.config is None:
        raise ConfigError(f"{folder.path}: the loss is defined by the run file: {folder.config_problem}")
    config = folder.config.trainer
    fallbacks: Counter[str] = Counter()
    tokens: dict[str, list[TokenExplanation]] = {trajectory.trajectory_id: [] for trajectory in chosen}
    for token in _explain(folder, folder.config, store, policy, batch):  # all of the batch; only some are shown
        if token.old_logprob_fallback:
            fallbacks[token.old_logprob_fallback] += 1
        if token.trajectory_id in tokens:
            tokens[token.trajectory_id].append(token)
    decode = decoder((policy.base or policy).folder)
    return ExplainedBatch(
        old_logprobs=config.algorithm.old_logprobs,
        minibatches=config.minibatches,
        fallbacks=dict(fallbacks),
        notes=tuple(_notes(config, fallbacks, train_step)),
        trajectories=tuple(
            ExplainedTrajectory(
                each,
                decode(each.prompt.token_ids),
                decode(each.response_ids),
                tuple(shown := tokens[each.trajectory_id]),
                tuple(decode(np.array([token.token_id], np.int32)) for token in shown),
            )
            for each in chosen
        ),
    )


def print_explanation(explained: ExplainedTrajectory, console: "Console") -> None:
    """Print one trajectory as a table with one row per token."""
    from rich.table import Table
    from rich.text import Text

    trajectory = explained.trajectory
    outcome, reward = trajectory.outcome, "unscored"
    if outcome is not None:
        reward = outcome.kind.value if outcome.verdict is None else f"reward {outcome.verdict:g}"
    title = f"{trajectory.trajectory_id}: {reward}, shaped {trajectory.shaped_reward:g}"
    if not (taught := any(token.teacher_logprob is not None for token in explained.tokens)):
        # With credit by turn a trajectory has several; with a teacher every token its own, which stands beside it.
        found = dict.fromkeys(f"{t.advantage:.3f}" for t in explained.tokens if t.policy_version is not None)
        title += f", advantage {', '.join(found) or 0}"
    if trajectory.prompt.domain:
        title += f", domain {trajectory.prompt.domain}"
    if trajectory.cut_token_count:
        title += f", {trajectory.cut_token_count} tokens cut off by curriculum.group_shaper"
    console.print(Text(title, style="bold"))
    console.print(Text(f"prompt   {explained.prompt}", style="dim"))
    console.print(Text(f"response {explained.response}", style="dim"))
    table = Table(box=None, padding=(0, 1))
    table.add_column("#", justify="right")
    table.add_column("token")
    for name in ("version", "stale", *(_OF_TEACHER if taught else ()), "behavior", "old", "now", "ratio", "weight"):
        table.add_column(name, justify="right")
    table.add_column("result")
    for token, text in zip(explained.tokens, explained.texts, strict=True):
        table.add_row(*_row(token, text), style=_REASON_STYLES.get(token.reason, "red"))
    console.print(table)
    if not explained.tokens:
        console.print(Text("no token of this trajectory was trained: it has no reward", style="yellow"))


def _row(token: "TokenExplanation", text: str) -> list[Any]:
    from rich.text import Text

    shown = Text(text.encode("unicode_escape").decode("ascii") if not text.isprintable() else text)
    teacher = () if token.teacher_logprob is None else (f"{token.advantage:.3f}", f"{token.teacher_logprob:.3f}")
    if token.policy_version is None:
        return [str(token.position), shown, "-", *[""] * (6 + len(teacher)), token.reason]
    version = str(token.policy_version) + ("" if token.pure else "*")
    old = f"{token.old_logprob:.3f}" + (_FALLBACK_MARK if token.old_logprob_fallback else "")
    behavior, *numbers = (f"{n:.3f}" for n in (token.behavior_logprob, token.logprob, token.ratio, token.weight))
    reason = token.reason if token.pure else f"{token.reason} (*cache of another version)"
    return [str(token.position), shown, version, str(token.staleness), *teacher, behavior, old, *numbers, reason]


def _notes(config: TrainerConfig, fallbacks: Mapping[str, int], train_step: int) -> Iterator[str]:
    for reason, count in sorted(fallbacks.items()):
        yield (
            f"{reason}: {count} token(s) of the batch have the sampler's logprob as their old one (marked "
            f"{_FALLBACK_MARK}), not that of trainer.algorithm.old_logprobs={config.algorithm.old_logprobs}: "
            f"{_NOT_AS_TRAINED[reason]}"
        )
    if fallbacks:
        yield (
            "metrics.jsonl contains the number of fallbacks in the training: policy.old_logprob_fallbacks of step "
            f"{train_step}"
        )
    if config.minibatches > 1:
        yield (
            f"trainer.minibatches={config.minibatches}: every token is shown with the weights at the start of the "
            "step; only the first minibatch was trained on these, the later groups of the batch on updated weights, "
            "with other ratios and weights"
        )


def _batch(store: CheckpointStore, train_step: int) -> Batch:
    steps = store.batch_steps()
    if train_step not in steps:
        whole = steps and steps[-1] - steps[0] == len(steps) - 1
        have = f"steps {steps[0]} to {steps[-1]}" if whole else f"the steps {', '.join(map(str, steps))}"
        available = f"{have} have one" if steps else "there is none yet"
        raise DataError(f"train step {train_step}: no batch file ({available})")
    return store.training_batch(train_step)


def _chosen(batch: Batch, trajectory_id: str | None, limit: int) -> list[Trajectory]:
    everything = [t for group in batch.groups for t in group.trajectories]
    if trajectory_id is None:
        return everything[:limit]
    chosen = [t for t in everything if t.trajectory_id == trajectory_id]
    if not chosen:
        known = listed([t.trajectory_id for t in everything])
        raise DataError(f"trajectory {trajectory_id!r} is not in batch {batch.train_step}; it contains {known}")
    return chosen


def _weights_before(store: CheckpointStore, train_step: int) -> PolicyRecord:
    """Return the newest policy of train step ``train_step - 1``. Raises DataError when it is pruned."""
    records = store.complete_policies()
    matching = [record for record in records if record.train_step == train_step - 1]
    if not matching:
        after = {record.train_step + 1 for record in records}
        kept = ", ".join(str(step) for step in store.batch_steps() if step in after) or "none"
        raise DataError(
            f"train step {train_step}: the policy at its start is pruned, so its ratios cannot be computed again; "
            f"increase checkpoints.keep_last for the next run. Steps that can be explained: {kept}"
        )
    return matching[-1]


def _explain(
    folder: RecordedRun, config: RunConfig, store: CheckpointStore, policy: VerifiedPolicy, batch: Batch
) -> "Iterator[TokenExplanation]":
    from rollmesh.trainer.learner.policy_trainer import PolicyTrainer

    records = {record.policy_version: record for record in store.complete_policies()}

    def folder_of(version: int) -> Path | None:
        record = records.get(version)
        try:
            return None if record is None else store.open(record).folder
        except CheckpointError:
            return None  # the old-logprob source then falls back to the sampler, as in training

    trainer = PolicyTrainer(
        (policy.base or policy).folder,
        config.trainer,
        adapter=config.model.adapter,
        device="cpu",
        max_token_staleness=folder.max_staleness if folder.mask_old_segments else None,
        policy_folder=folder_of,
    )
    if policy.base is not None:
        trainer.take_weights(policy.folder)
    train_steps = known_train_steps(folder, store, None)
    return trainer.explain(batch, train_steps, store.batch_footer(batch.train_step).settings)
