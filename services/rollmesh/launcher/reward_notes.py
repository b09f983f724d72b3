"""Console notes of a run that learns nothing: a reward that stays 0, answers that are all cut off."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_STEPS = 5
"""Train steps after which a note is due; all of a shorter run."""
_EQUAL_GROUPS = 20
_NOTES = {
    "reward": (
        "hint: the reward was 0 in each of the first {steps} train steps, so the policy learns nothing: score an "
        "answer of samples.jsonl with the verifier by hand; if it is right to give 0, the task is too hard for this "
        "model, or the prompt does not ask for the form that the verifier reads"
    ),
    "truncated": (
        "hint: every answer of the first {steps} train steps was cut off at rollout.max_new_tokens: raise it, or check "
        "that the model ends its answers (eos_token_id, data.source.chat)"
    ),
}


class RewardNotes:
    """Reader of the step reports of one session; each note is due once, at its first steps."""

    def __init__(self, train_steps: int) -> None:
        self._due = min(_STEPS, train_steps)
        self._seen = 0
        self._left = set(_NOTES)
        self._noted_equal = False

    def equal(self, groups_in_a_row: int) -> Iterator[str]:
        """Yield the note on groups that are left out because all their answers have the same reward, once."""
        if groups_in_a_row >= _EQUAL_GROUPS and not self._noted_equal:
            self._noted_equal = True
            yield (
                f"hint: {groups_in_a_row} groups in a row had equal rewards for all their answers, all right or all "
                "wrong, and are not trained on; schedule.max_filtered_in_a_row of them end the run: try the verifier "
                "on an answer by hand, or choose easier, or harder, prompts"
            )

    def read(self, report: Mapping[str, Any]) -> Iterator[str]:
        """Yield the notes that are due after this report."""
        if "reward_mean" not in report or self._seen >= self._due:
            return
        self._seen += 1
        if report["reward_mean"] != 0:
            self._left.discard("reward")
        batch = report.get("batch")
        if not isinstance(batch, Mapping) or batch.get("truncated_share") != 1:
            self._left.discard("truncated")
        if self._seen == self._due:
            yield from (_NOTES[name].format(steps=self._due) for name in sorted(self._left))
