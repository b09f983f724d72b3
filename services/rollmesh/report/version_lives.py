"""Times of every policy version after its weights were copied out, from the logs of trainers and generators."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rollmesh.report.recorded_run import Record, read_json_lines

_TRAINED, _ANNOUNCED, _SERVED = "step_trained", "policy_announced", "policy_in_service"


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionLife:
    """Seconds from the copy of a version's weights; training continues from there."""

    policy_version: int
    announced: float
    """Seconds until the version was announced, and its folder marked."""
    first_served: float | None
    """Seconds until the first generator served it; None if all generators skipped it."""
    last_served: float | None
    """Seconds until the last generator that loads it served it."""


def version_lives(logs: Iterable[Path]) -> tuple[VersionLife, ...]:
    """Return the versions that were trained and announced, ascending.

    A version that a crash interrupted counts from its newest copy. A version whose step was replayed after its
    announcement is left out, because the log does not tell its copy from the replay.
    """
    copied: dict[int, float] = {}
    announced: dict[int, float] = {}
    served: dict[int, list[float]] = {}
    for name, version, time in _events(logs):
        if name == _TRAINED:
            copied[version] = max(time, copied.get(version, time))
        elif name == _ANNOUNCED:
            announced[version] = max(time, announced.get(version, time))
        else:
            served.setdefault(version, []).append(time)
    lives: list[VersionLife] = []
    for version in sorted(copied.keys() & announced.keys()):
        start, times = copied[version], served.get(version, [])
        lives.append(
            VersionLife(
                policy_version=version,
                announced=announced[version] - start,
                first_served=min(times) - start if times else None,
                last_served=max(times) - start if times else None,
            )
        )
    return tuple(life for life in lives if life.announced >= 0)


def _events(logs: Iterable[Path]) -> Iterator[tuple[str, int, float]]:
    """Yield event, policy version and Unix time of the three lines of a version's life."""
    for log in logs:
        if log.name.startswith(("trainer-", "generator-")):
            for record in read_json_lines(log).records:
                if record.get("event") in (_TRAINED, _ANNOUNCED, _SERVED):
                    yield str(record["event"]), int(record["policy_version"]), _time(record)


def _time(record: Record) -> float:
    return datetime.fromisoformat(str(record["timestamp"])).timestamp()
