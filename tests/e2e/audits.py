"""Questions of the tests about an audit."""

from __future__ import annotations

from typing import Any


def assert_rescored(audit: dict[str, Any]) -> None:
    """The log-probabilities of what was trained are those of the checkpoints that they name.

    Of single tokens this is asked as the audit asks it, in nats where float32 resolves them; the largest gap alone
    would be over 1e-4 once in some hundred correct runs, for a token that it does not.
    """
    rescoring = audit["rescoring"]
    versions = [version for version in rescoring["versions"] if version["tokens"] and not version["skipped"]]
    assert rescoring["tokens"] == sum(version["tokens"] for version in versions) > 0
    assert rescoring["bound"] == 1e-4 and [version["over_bound"] for version in versions] == [0] * len(versions)
    # Scored by a neighbouring policy version they are some 1e-3 off in the mean, by their own some 1e-7.
    assert max(version["mean_gap"] for version in versions) < 1e-5
    # Up to 5 of 550,000 tokens in most demos, more than 11 in one: their number is chance.
    assert sum(version["unresolvable"] for version in versions) <= max(20, 1e-3 * rescoring["tokens"])
    assert rescoring["largest_gap"] < 1e-3
