"""Steps of a weight update under running requests, and classification of a failed one. Pure functions.

mode        running requests                        server's cache     order
interrupt   retract: back to its queue, prefilled   dropped            pause(retract), update(flush), continue
            again under the new weights
            abort: end as interrupted               dropped            abort each, pause(retract), update(flush), ...
keep_kv     continue in place                       kept               pause(in_place), update(no flush), continue
drain       finished before                         dropped            pause(retract), update(flush), continue

A version below the one in service (a pin) ends running calls: the versions of one call never decrease. A load that
replaces a version on trial drops all tokens sampled under that version.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollmesh.generator.engines.engine_protocol import OnNewVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class ReloadPlan:
    """Steps of one weight update."""

    end_running: bool
    """True if running calls end as interrupted first."""
    pause_mode: str
    flush: bool
    """True if the server drops its cache with the update."""


def plan_reload(
    mode: OnNewVersion, *, interrupt: str, version: int, in_service: int, on_trial: int | None
) -> ReloadPlan:
    """Plan the update from the policy ``in_service`` to ``version``.

    ``on_trial`` is a version in the server that was not put in service: the load replaces it.
    """
    falls = version < in_service
    if on_trial is not None or falls:
        return ReloadPlan(end_running=falls, pause_mode="retract", flush=True)
    if mode is OnNewVersion.KEEP_KV:
        return ReloadPlan(end_running=False, pause_mode="in_place", flush=False)
    ends = mode is OnNewVersion.INTERRUPT and interrupt == "abort"
    return ReloadPlan(end_running=ends, pause_mode="retract", flush=True)


_UNCHANGED_MESSAGES = ("Failed to get weights iterator", "Failed to get model loader")
"""Error messages of a server that failed before it wrote a single weight."""


def nothing_changed(message: str, reported_version: str, version_before: int) -> bool:
    """Tell whether a failed update certainly left the old weights in place.

    The server reports a rollback after an update that failed half-way, but it reads the weights for the rollback from
    the folder that it could not load. The state of the server is then unknown.
    """
    return message.startswith(_UNCHANGED_MESSAGES) and reported_version == str(version_before)
