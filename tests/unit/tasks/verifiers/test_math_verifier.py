"""math-verify behind the math verifier."""

from typing import Any

import pytest

from rollmesh.errors import VerifierError
from rollmesh.tasks.verifiers.verifier_protocol import Verifier, build_verifier

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
        (r"\left\{1,2\right\}", r"Check \boxed{3}. Thus \boxed{\left\{1,2\right\}}", 1.0),
        (r"\left\{1,2\right\}", r"\boxed {\{2,1\}}", 1.0),
        ("3", r"\boxed{2} solves \left\{ x = 2 \right. and so \boxed{3}", 1.0),
        ("7", "\\boxed{3} or\n\\fbox{7}", 1.0),
        ("2010_7", "The answer is 2010_7.", 1.0),
        ("2010_7", "The answer is 2010_8.", 0.0),
        ("2010_7", "2010_7 = 693_{10}, so $2010_7$", 1.0),
        (2.5e-6, "The answer is 2.5e-06.", 1.0),
        ("7", "So $5=7$", 0.0),
        ("7", r"So $\boxed 7$", 1.0),
        (r"-\$5", r"I lose: -\$5.", 1.0),
        (r"\$32,\!348", "It costs $32,348.", 1.0),
    ],
)
def test_answers_are_compared_as_mathematics(verifier: Verifier, answer: Any, response: str, expected: float) -> None:
    assert verifier.verify(response, {"answer": answer}) == expected


KINDS: dict[str, list[tuple[Any, list[str], list[str]]]] = {
    "amounts of money": [
        (r"\$32,\!348", ["32348", "32{,}348", r"\$32,348"], ["32347", "32"]),
        (r"-\$5", ["-5", r"-\$5"], ["5"]),
        (r"\$1.50", ["1.5", r"\$1.50"], ["150", "50"]),
        (r"$\$32$", ["32", r"\$32"], ["33"]),
        ("$5", ["5"], ["4"]),
        ("\u20ac20", ["20", "\u20ac20"], ["2"]),
        (r"\$32,\!348", ["32348.00", r"\$32,348\text{ in total}"], ["32349"]),
    ],
    "formulas in a text": [
        ("The answer is $5$", ["5"], ["6"]),
        (r"\(5\)", ["5"], ["6"]),
        (r"\boxed {5}", ["5"], ["6"]),
    ],
    "numbers of JSON": [
        (2.5e-06, ["0.0000025", r"2.5\times10^{-6}", "2.5e-6"], ["2.5e-6+1", "0.25"]),
        (1e-5, ["10^{-5}", "1e-05"], ["e-5", "0.0001"]),
        (1e23, ["10^{23}"], ["10^{22}", r"1.1\times10^{23}"]),
        (-1e-7, ["-10^{-7}"], ["10^{-7}"]),
        ("2.5e-06", ["0.0000025"], ["0.25"]),
        (2e-6, ["2e-6", "0.000002"], ["2e-7", "2e-5"]),
        ("1e-7", ["10^{-7}"], ["10^{-6}"]),
        ("3e8", ["300000000"], ["3e7"]),
        ("2e-1", [r"-1+2e", "2e-1", "0.2"], ["0.02"]),
    ],
    "small and large numbers": [
        (r"9.1\times10^{-31}", [r"9.1\cdot 10^{-31}"], [r"1.6\times10^{-19}", "0"]),
        ("10^{-20}", [r"\frac{1}{10^{20}}"], ["10^{-30}", r"2\times10^{-20}"]),
        ("0.0000001", ["10^{-7}"], ["0.0000002", "0"]),
        ("0", ["0.0"], ["10^{-20}"]),
        (r"9.1\times10^{-31} x", [r"9.1\cdot10^{-31}x"], [r"1.6\times10^{-19} x"]),
        (r"m=9.1\times10^{-31}", [r"9.1\cdot10^{-31}"], [r"m=1.6\times10^{-19}"]),
        (r"\{10^{-31},5\}", [r"\{5,10^{-31}\}"], [r"\{5,10^{-19}\}"]),
        (r"(0,9.1\times10^{-31})", [r"(0,9.1\cdot10^{-31})"], [r"(0,1.6\times10^{-19})"]),
        (r"6.02\times10^{23}", ["602" + "0" * 21], [r"6.03\times10^{23}"]),
        (r"\frac{1}{3}\times10^{-8}", [r"3.33333\times10^{-9}"], [r"3.33\times10^{-9}"]),
        (1.6021766e-19, [r"1.602177\times10^{-19}\text{ C}"], [r"1.6021\times10^{-19}"]),
        ("2^{-60}", ["2^{-60}"], ["2^{-61}"]),
        ("10^{100}", ["10^{100}"], ["10^{100}+1"]),
        (r"\frac{1}{81}", ["0.0123457"], ["0.01234"]),
        ("1234567.89", ["1,234,567.89"], ["1234567.88"]),
        (r"1000\sqrt2", ["1414.213562"], ["1414.21"]),
    ],
    "numbers in other spellings": [
        (r"100\,000", ["100000", "100,000"], ["100", "0"]),
        ("1 000 000", ["1000000", r"1\ 000\ 000"], ["1", "0"]),
        ("3 1/2", ["3.5", r"3\frac12"], ["1.5", "1/2"]),
        (r"0.3\overline{6}", [r"\frac{11}{30}"], ["0.36", r"0.\overline{36}"]),
        (r"\frac13", [r"0.\overline{3}"], [r"0.\overline{4}"]),
        ("42", ["42.", r"\approx 42"], ["43.", "4"]),
        (r"f(x)=\left\{x\right.", [r"f(x)=\left\{x\right."], ["x"]),
    ],
    "percentages": [
        (r"37\%", ["37", "0.37"], ["38", r"3.7\%"]),
        (r"12.5\%", ["12.5", "0.125", r"\frac18", r"12\frac12\%"], ["12", r"12.6\%"]),
        (r"16\frac{2}{3}\%", [r"\frac{50}{3}\%", r"\frac16", r"16\frac23"], [r"\frac{2}{3}\%", r"16\%", r"\frac23"]),
        (r"\{12.5\%,20\%\}", ["12.5,20"], ["12,20"]),
    ],
    "choices with their values": [
        (r"\textbf{(B)}\ 6", ["6", "B", "(B)", r"\text{(B) }6"], ["7", "C"]),
        ("6", [r"\textbf{(B)}\ 6", r"\mathrm{(B)}~6", r"\text{(B)}6"], [r"\textbf{(B)}\ 7"]),
        ("B", [r"\text{(B) Paris}", r"\textbf{(B)}\ 6"], [r"\text{(C) Rome}"]),
    ],
    "numerals with a base": [
        (
            "2010_7",
            ["2010_7", "(2010)_{7}", "2010", r"2010_{\text{seven}}"],
            ["2010_8", r"2010_{\text{eight}}", "2011_7"],
        ),
        ("A4_{16}", [r"\text{A4}_{16}"], ["A4_{12}", "A5_{16}"]),
        (r"2010_{(7)}", ["2010_7"], ["2010_8", "2010_{(8)}"]),
        (r"\{10_2,11_2\}", [r"\{11_2,10_2\}"], [r"\{10_3,11_3\}"]),
    ],
    "sets and tuples": [
        (r"\left\{1,2\right\}", [r"\{2,1\}", "1,2"], ["(1,2)", "[1,2]", r"\left\{1,3\right\}"]),
        (r"\{1,2,3\}", [r"\{3,2,1\}"], ["(1,2,3)"]),
        ("(1,2)", ["1,2"], [r"\{1,2\}", "{1,2}", "(2,1)"]),
        ("{1,2}", [r"\{2,1\}", "1,2"], ["(1,2)"]),
        (r"\lbrace 1,2\rbrace", [r"\{1,2\}"], ["(1,2)", "1.2"]),
        (r"\emptyset", [r"\varnothing"], ["0"]),
        ("(1,2,3)", ["(1,2,3)"], [r"\{1,2,3\}"]),
    ],
    "equations": [
        ("7", ["x=7", "2+5=7", "m+n=7"], ["5=7", "x=5=7", "5=x=7", r"\sqrt{2}=7"]),
        ("x=7", ["7"], ["5=7", "y=7"]),
        ("x=1,y=2", ["y=2,x=1"], ["x=1,y=3"]),
    ],
}


@pytest.mark.parametrize("kind", KINDS)
def test_right_answers_in_every_spelling_score_1_and_wrong_ones_0(verifier: Verifier, kind: str) -> None:
    for answer, right, wrong in KINDS[kind]:
        scores = {text: verifier.verify(f"\\boxed{{{text}}}", {"answer": answer}) for text in [*right, *wrong]}
        assert scores == {**dict.fromkeys(right, 1.0), **dict.fromkeys(wrong, 0.0)}, answer


@pytest.mark.parametrize("response", [r"\boxed{1}", "$$"])
def test_a_reference_that_is_no_mathematics_is_an_error_for_every_answer(verifier: Verifier, response: str) -> None:
    with pytest.raises(VerifierError, match="not mathematics that sympy can read"):
        verifier.verify(response, {"answer": "$$"})


def test_an_answer_that_takes_too_long_counts_as_wrong(verifier: Verifier) -> None:
    assert verifier.timeout_means_wrong
