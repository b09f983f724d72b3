"""Questions of the tests about an audit."""

from __future__ import annotations

from typing import Any

from rollmesh.report.audit_result import LEAST_MEAN_TOKENS


def assert_rescored(audit: dict[str, Any]) -> None:
    """The log-probabilities of what was trained are those of the checkpoints that they name.

    Of single tokens this is asked as the audit asks it: within 1e-4 nats, or as near as float32 can tell. How far the
    few others are off, that the audit excuses, is chance.
    """
    rescoring = audit["rescoring"]
    versions = [version for version in rescoring["versions"] if version["tokens"] and not version["skipped"]]
    assert rescoring["tokens"] == sum(version["tokens"] for version in versions) > 0
    assert rescoring["bound"] == 1e-4 and [version["over_bound"] for version in versions] == [0] * len(versions)
    # Scored by a neighbouring policy version they are some 1e-3 off in the mean, by their own some 1e-7.
    assert all(version["mean_gap"] < 1e-5 for version in versions if version["tokens"] >= LEAST_MEAN_TOKENS)
    # One token of 540,055 in one demo and none of 550,644 in another.
    assert sum(version["unresolvable"] for version in versions) <= max(20, 1e-3 * rescoring["tokens"])
