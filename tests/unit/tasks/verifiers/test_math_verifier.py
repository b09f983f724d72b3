"""math-verify behind the math verifier."""

from __future__ import annotations

from typing import Any

import pytest

from rollmesh.errors import VerifierError
from rollmesh.tasks.verifiers.verifier_protocol import Verifier
from rollmesh.tasks.verifiers.verifier_registry import build_verifier

pytest.importorskip("math_verify")


@pytest.fixture(scope="module")
def verifier() -> Verifier:
    return build_verifier("math", {})


@pytest.mark.parametrize(
    ("answer", "response", "expected"),
    [
        ("42", r"\boxed{42}", 1.0),
        ("42", r"\boxed{042}", 1.0),
        (42.0, r"so \boxed{42}", 1.0),
        ("42", r"\boxed{41}", 0.0),
        ("42", "blah 42.", 1.0),
        ("42", "first 42 then 41", 0.0),
        (r"\frac{1}{2}", r"the answer is \boxed{0.5}", 1.0),
        ("1/2", r"\boxed{\frac{1}{2}}", 1.0),
        (r"$\frac{1}{2}$", r"\boxed{\dfrac12}", 1.0),
        ("0.333333", r"\boxed{\frac13}", 1.0),
        ("x^2+2x+1", "so $(x+1)^2$", 1.0),
        ("x^2+2x+1", r"\boxed{x^2+2x}", 0.0),
        ("(1,2)", r"\boxed{(1, 2)}", 1.0),
        ("[0,1)", r"\boxed{[0, 1)}", 1.0),
        (r"\{1,2\}", r"\boxed{\{2,1\}}", 1.0),
        (r"\sqrt{8}", r"\boxed{2\sqrt{2}}", 1.0),
        (r"2\pi", r"\boxed{2\pi}", 1.0),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", 1.0),
        (["3", "-3"], r"\boxed{-3}", 1.0),
        ("1,000", r"\boxed{1000}", 1.0),
        ("42", "", 0.0),
        ("42", "I do not know", 0.0),
        ("42", r"\boxed{}", 0.0),
        ("42", r"\boxed{42", 0.0),
    ],
)
def test_answers_are_compared_as_mathematics(verifier: Verifier, answer: Any, response: str, expected: float) -> None:
    assert verifier.verify(response, {"answer": answer}) == expected


def test_a_reference_that_is_no_mathematics_is_an_error(verifier: Verifier) -> None:
    with pytest.raises(VerifierError, match="not mathematics that sympy can read"):
        verifier.verify(r"\boxed{1}", {"answer": "$$"})


def test_an_answer_that_takes_too_long_counts_as_wrong(verifier: Verifier) -> None:
    assert verifier.timeout_means_wrong
