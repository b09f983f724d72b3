"""Which teacher scores a prompt, and which scores of it are usable."""

from __future__ import annotations

import numpy as np
import pytest

from rollmesh.config.teachers import TeacherConfig, teacher_of_domain
from rollmesh.errors import NoTeacherScores
from rollmesh.types import TeacherColumn
from rollmesh.worker.trajectory_scoring import check_column


@pytest.mark.parametrize(
    ("domain", "name"), [("code", "coder"), ("sql", "coder"), ("sums", "general"), ("", "general")]
)
def test_a_prompt_has_the_teacher_that_names_its_domain_else_the_general_one(domain: str, name: str) -> None:
    teachers = {
        "general": TeacherConfig(model="a"),
        "coder": TeacherConfig(model="b", domains=("code", "sql")),
        "prover": TeacherConfig(model="c", domains=("proofs",)),
    }
    assert teacher_of_domain(teachers, domain) == name
    del teachers["general"]
    assert teacher_of_domain(teachers, domain) == (None if name == "general" else name)


def test_the_sampled_token_need_not_be_among_the_most_likely_ones() -> None:
    column = TeacherColumn(
        teacher="math",
        manifest_digest="",
        logprobs=np.array([-9.0, -0.5], np.float32),
        top_ids=np.array([[3, 1], [2, 5]], np.int32),
        top_logprobs=np.array([[-0.5, -0.5], [-0.25, -3.0]], np.float32),
    )
    check_column(column, 2, 2)
    with pytest.raises(NoTeacherScores, match=r"teachers\.math: 2 log-probabilities for a response of 3 tokens"):
        check_column(column, 3, 2)
    with pytest.raises(NoTeacherScores, match="the 2 most likely tokens, not top_k=0"):
        check_column(column, 2, 0)
