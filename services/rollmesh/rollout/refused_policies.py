"""Policy versions that every generator refuses: a run that cannot use what it trains has to end.

A diverged run looks like this: the weights are not finite or no longer what the canary says, every generator keeps its
old policy, and sooner or later the staleness bound stops the mesh for good.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollmesh.errors import PoliciesRefused
from rollmesh.types import GeneratorRecord


def refused_by_all(newest_version: int, generators: Sequence[GeneratorRecord]) -> GeneratorRecord | None:
    """The generator that has refused the fewest versions in a row, if every one refuses the newest; else None."""
    if not generators or any(g.refused_version != newest_version for g in generators):
        return None
    return min(generators, key=lambda g: g.refused_count)


class RefusedPolicies:
    """Decides when refusals end the run: after so many versions in a row, or after a time with the same version."""

    def __init__(self, version_limit: int, seconds: float) -> None:
        self._version_limit = version_limit
        self._seconds = seconds
        self._refused_since: tuple[int, float] | None = None
        """Newest version and the moment since which every generator refuses it."""

    def judge(
        self, now: float, newest_version: int, generators: Sequence[GeneratorRecord], *, trains: bool = False
    ) -> PoliciesRefused | None:
        """Return the error that ends the run; None while it need not end. ``now`` are monotonic seconds.

        While the trainer ``trains`` no time passes: the next version may be served again.
        """
        refusal = refused_by_all(newest_version, generators)
        if refusal is None:
            self._refused_since = None
            return None
        if trains or self._refused_since is None or self._refused_since[0] != newest_version:
            self._refused_since = (newest_version, now)
        if refusal.refused_count >= self._version_limit:
            why = f"{refusal.refused_count} versions in a row (generator.refused_versions_limit={self._version_limit})"
        elif now - self._refused_since[1] >= self._seconds:
            why = f"it for {self._seconds:.0f} s (launcher.start_timeout_seconds)"
        else:
            return None
        return PoliciesRefused(
            f"every generator refuses policy version {newest_version}, and has refused {why}: "
            f"{refusal.refused_reason}; roll back to an older version or lower trainer.learning_rate"
        )
