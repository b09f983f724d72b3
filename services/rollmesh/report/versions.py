"""Policy versions of a run: their bytes, from the manifests that are left, and their times, from the logs."""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rollmesh.checkpoints.manifest import Manifest, parse_manifest
from rollmesh.checkpoints.policies import found_manifests
from rollmesh.errors import CheckpointError
from rollmesh.report.console import count
from rollmesh.report.recorded_run import RecordedRun, read_json_lines


def version_bytes(run: RecordedRun) -> dict[int, str]:
    """Tell the bytes of each version up to the newest one of which a manifest is left; later ones were not published.

    The manifests are those below the run's checkpoint folder, with an object store those in this node's cache.
    Signatures are not checked, and nothing is fetched. Of two folders with the same version the announced one counts,
    then the newer one.
    """
    found = []
    for entry in found_manifests(run.checkpoints):
        with contextlib.suppress(CheckpointError):  # unreadable: the audit reports it
            found.append((entry.announced, parse_manifest(entry.data or b"", entry.path)))
    found.sort(key=lambda pair: (pair[0], pair[1].create_time))
    known = {manifest.policy_version: _text(manifest) for _, manifest in found}
    older = "not in this cache" if run.checkpoint_section.remote else "not kept or unreadable"
    return {version: known.get(version, older) for version in range(max(known, default=-1) + 1)}


def _text(manifest: Manifest) -> str:
    written = count(sum(file.size_bytes for file in manifest.files))
    if manifest.delta is not None:
        return f"{written} ({count(sum(file.size_bytes for file in manifest.stored_files))} uploaded, as a delta)"
    return f"{written} (adapter)" if manifest.kind == "adapter" else f"{written}"


_TRAINED, _ANNOUNCED, _SERVED = "step_trained", "policy_announced", "policy_in_service"
_TAKES_OVER = "trainer_takes_over"


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionLife:
    """Seconds from the copy of a version's weights; training continues from there."""

    policy_version: int
    announced: float
    """Seconds until the version was announced, and its folder marked."""
    first_served: float | None
    """Seconds until the first generator served it; None if no running generator loaded it."""
    last_served: float | None
    """Seconds until the last generator that loads it served it."""


def version_lives(logs: Iterable[Path]) -> tuple[VersionLife, ...]:
    """Return the versions that were trained and announced, ascending.

    A version that a crash interrupted counts from its newest copy. A version whose step was replayed after its
    announcement is left out, because the log does not tell its copy from the replay. So is one that the next trainer
    announced without a copy, because the time between the two processes is no part of the publication.
    """
    events: dict[str, dict[int, list[float]]] = {}
    for name, version, time in _events(logs):
        events.setdefault(name, {}).setdefault(version, []).append(time)
    copied, announced, served = (events.get(name, {}) for name in (_TRAINED, _ANNOUNCED, _SERVED))
    takeovers = events.get(_TAKES_OVER, {}).get(-1, [])
    lives: list[VersionLife] = []
    for version in sorted(copied.keys() & announced.keys()):
        start, times = max(copied[version]), served.get(version, [])
        # A registry that was lost is announced again.
        end = min((time for time in announced[version] if time >= start), default=None)
        if end is None or any(start < time < end for time in takeovers):
            continue
        lives.append(
            VersionLife(
                policy_version=version,
                announced=end - start,
                first_served=min(times) - start if times else None,
                last_served=max(times) - start if times else None,
            )
        )
    return tuple(lives)


def _events(logs: Iterable[Path]) -> Iterator[tuple[str, int, float]]:
    """Yield event, policy version and Unix time of the lines of a version's life, and of every start of a trainer.

    A load at the start of a generator is left out, and so is one of a version up to the newest that was loaded before,
    as after a pin: their times follow from the start and the pin.
    """
    for log in logs:
        if not log.name.startswith(("trainer-", "generator-")):
            continue
        newest_loaded = -1
        for record in read_json_lines(log).records:
            name, version = record.get("event"), record.get("policy_version")
            if name not in (_TAKES_OVER, _TRAINED, _ANNOUNCED, _SERVED):
                continue
            try:
                time = datetime.fromisoformat(str(record.get("timestamp"))).timestamp()
            except ValueError:
                continue  # a damaged line
            if name == _TAKES_OVER:
                yield name, -1, time
            # A step whose policy has diverged publishes no version.
            elif isinstance(version, int):
                is_again = name == _SERVED and (record.get("at_start", False) or version <= newest_loaded)
                if name == _SERVED:
                    newest_loaded = max(newest_loaded, version)
                if not is_again:
                    yield name, version, time
