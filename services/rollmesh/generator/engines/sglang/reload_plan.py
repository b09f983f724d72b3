"""What a load does to running requests, and what a failed one means. Pure functions.

mode        running requests                        server's cache     order
interrupt   retract: back to its queue, prefilled   dropped            pause(retract), update(flush), continue
            again under the new weights
            abort: end as interrupted               dropped            abort each, pause(retract), update(flush), ...
keep_kv     go on where they are                    kept               pause(in_place), update(no flush), continue
drain       have finished before                    dropped            pause(retract), update(flush), continue

A version below the one in service (a pin) ends running calls: the versions of one call never fall. Going back from a
version that was loaded but not put in service drops whatever was computed under it.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollmesh.generator.engines.engine_protocol import OnNewVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class ReloadPlan:
    """How the weights are changed."""

    end_running: bool
    """Running calls end as interrupted first."""
    pause_mode: str
    flush: bool
    """The server drops its cache with the update."""


def plan_reload(
    mode: OnNewVersion, *, interrupt: str, version: int, in_service: int, on_trial: int | None
) -> ReloadPlan:
    """The way from the policy ``in_service`` to ``version``.

    ``on_trial`` is a version in the server that was not put in service: the load takes it back out.
    """
    falls = version < in_service
    if on_trial is not None or falls:
        return ReloadPlan(end_running=falls, pause_mode="retract", flush=True)
    if mode is OnNewVersion.KEEP_KV:
        return ReloadPlan(end_running=False, pause_mode="in_place", flush=False)
    ends = mode is OnNewVersion.INTERRUPT and interrupt == "abort"
    return ReloadPlan(end_running=ends, pause_mode="retract", flush=True)


_UNTOUCHED = ("Failed to get weights iterator", "Failed to get model loader")
"""What the server says when it has given up before it wrote a single weight."""


def nothing_changed(message: str, reported_version: str, version_before: int) -> bool:
    """Whether a failed update certainly left the old weights in place.

    An update that failed half-way claims to have rolled back, but reads the weights for that from the folder that it
    could not load: such a server is in an unknown state.
    """
    return message.startswith(_UNTOUCHED) and reported_version == str(version_before)
