"""Updates that were not made are counted over train steps, until one is made."""

from __future__ import annotations

import numpy as np
import pytest

from rollmesh.trainer.learner.minibatches import Updates
from rollmesh.trainer.service.trainer_progress import Progress


def updates(*made: bool) -> Updates:
    nothing = np.zeros(0)
    return Updates(
        logprobs=nothing,
        entropy=nothing,
        as_served=nothing.astype(np.bool_),
        loss=0.0,
        grad_norm=0.0,
        rate_factor=1.0,
        applied=made,
        microbatches=1,
        forward_tokens=1,
        gradient_seconds=0.0,
        update_seconds=0.0,
    )


@pytest.mark.parametrize(
    ("made", "trailing"), [([True], 0), ([False, True], 0), ([True, False, False], 2), ([False, False], 2)]
)
def test_updates_after_the_last_one_that_was_made_are_counted(made: list[bool], trailing: int) -> None:
    assert updates(*made).trailing_skipped == trailing


def test_a_row_of_skipped_updates_goes_over_train_steps_and_restarts_and_ends_with_an_update() -> None:
    progress = Progress()
    for step in ([True, False], [False, False], [False]):
        done = updates(*step)
        progress = Progress.from_extra(progress.to_extra())
        progress.count_updates(done.applied.count(True), done.trailing_skipped)
    assert progress.nonfinite_updates_in_a_row == 4
    done = updates(True, False)
    progress.count_updates(done.applied.count(True), done.trailing_skipped)
    assert progress.nonfinite_updates_in_a_row == 1


def test_the_progress_of_an_older_state_has_no_such_row() -> None:
    assert Progress.from_extra({"progress": {"trained_token_total": 5}}).nonfinite_updates_in_a_row == 0
