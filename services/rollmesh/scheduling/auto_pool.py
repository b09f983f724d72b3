"""Automatic pool: the smaller of what the generators' caches hold and of what the trainer can consume in time.

What the trainer can consume (Little's law): while B groups are in the trainer, B others are on their way to the next
batch. They start together, when the policy is announced, and a group that takes R seconds to be ready, with T seconds
per update, is late for floor(R / T) batches. So B * E[floor(R / T)] more groups must be on their way. The margin that
keeps the trainer from waiting for the last group of a batch is B * E[R] / (4 T) + sqrt(B) / 2 groups, the second term
for chance, which counts more in small batches. Groups count from admission to the report of the trained batch, so what
waits ready takes the place of what could start.

What the caches hold: a running trajectory takes, on average over its life, its prompt and E[L^2] / (2 E[L]) tokens,
the stationary form of the Past-Future scheduler's peak (arXiv 2507.10150). Below this ceiling the bound falls by a
quarter when the generators preempt many calls or let calls wait, and rises by an eighth of a batch when they do not.
A few preemptions cost less than the calls that a smaller pool would not have run. ``decide`` has no memory: the bound
and its time are part of the desired state. The pool is never larger than the fixed one of the preset.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

from rollmesh.mesh import CachePool, EngineLoad, MeshView
from rollmesh.scheduling.resolved_schedule import Schedule

_CACHE_SHARE = 0.9
"""Share of the caches that the pool may be expected to fill."""
_MARGIN = 0.25
"""Share of E[R] / T that is margin. In simulations of batches of 16 groups with exponential, gamma and lognormal R of
mean T / 10 to 2.5 T, the trainer then waits for at most 1% of the time."""
_MARGIN_FOR_CHANCE = 0.5
"""Margin in square roots of B."""
_SETTLE_SECONDS = 10.0
"""Least time between two changes of the cache bound: two heartbeats of the generators, by default."""
_LESS = 0.75
_PREEMPTED_SHARE = 0.05
"""Calls preempted between two changes of the cache bound, as a share of it, that cost less than a smaller pool does."""
_WAITING_SHARE = 0.25
"""Waiting calls, as a share of the slots, that keep slots from falling idle between two calls."""
_BYTES_PER_PROMPT_TOKEN = 4


def trainer_groups(schedule: Schedule, view: MeshView) -> int:
    """Return the most groups admitted and not yet trained that the trainer can consume in time.

    At least two batches, the one in the trainer and the next, and at most the window; with a fixed pool the window.
    """
    if not schedule.auto_pool:
        return schedule.window_groups
    ready, update, batch = view.ready_seconds, view.update_seconds, schedule.groups_per_batch
    ratio = 0.0 if ready is None or update is None else ready / max(update, 1e-3)
    batches = 2 + (view.ready_updates or 0.0) + _MARGIN * ratio
    # The window first: the product may be too large for an integer.
    return math.ceil(min(schedule.window_groups, batches * batch + _MARGIN_FOR_CHANCE * math.sqrt(batch)))


def trainer_pool(schedule: Schedule, view: MeshView) -> int:
    """Return the trajectories of the groups that may be ahead of the batch in the trainer; at least one batch."""
    batch = schedule.groups_per_batch
    return max(batch, trainer_groups(schedule, view) - batch) * schedule.launched_members


def cache_pool(schedule: Schedule, view: MeshView) -> CachePool | None:
    """Return the next state of the bound by the caches; None with a fixed pool, and before there is a bound."""
    engines, before = view.engines, view.desired.cache_pool
    if not schedule.auto_pool or engines is None or not engines.kv_token_capacity:
        return before if schedule.auto_pool else None
    ceiling = _ceiling(schedule, view, engines)
    if before is None:
        return CachePool(size=ceiling, since=view.now, preemptions=engines.preemptions)
    if 0 <= view.now - before.since < _SETTLE_SECONDS:
        return before if before.size <= ceiling else replace(before, size=ceiling)
    size = _next_size(schedule, engines, before)
    return CachePool(size=min(size, ceiling), since=view.now, preemptions=engines.preemptions)


def pool_size(schedule: Schedule, view: MeshView) -> int:
    """Return the number of trajectories that may be leased at once over the whole mesh; at least one group."""
    return pool_and_bound(schedule, view)[0] + view.beyond_pool


def pool_and_bound(schedule: Schedule, view: MeshView) -> tuple[int, CachePool | None]:
    """Return the pool size, without what waits beyond it, and the next state of its bound by the caches."""
    if not schedule.auto_pool:
        return schedule.pool_size, None
    size, by_caches = trainer_pool(schedule, view), cache_pool(schedule, view)
    if by_caches is not None:
        size = min(size, by_caches.size)
    return max(schedule.launched_members, min(size, schedule.pool_size)), by_caches


def pool_groups(schedule: Schedule, view: MeshView) -> int:
    """Return the number of groups that fill the pool, rounded up."""
    return -(-pool_size(schedule, view) // schedule.launched_members)


def _next_size(schedule: Schedule, engines: EngineLoad, before: CachePool) -> int:
    less = math.floor(_LESS * before.size)
    if engines.preemptions - before.preemptions > _PREEMPTED_SHARE * before.size:
        return max(schedule.launched_members, less)
    # Fewer calls than slots would leave slots idle.
    enough = math.ceil((1 + _WAITING_SHARE) * engines.slots)
    if engines.waiting > _WAITING_SHARE * engines.slots and before.size > enough:
        return max(enough, less)
    return before.size + math.ceil(schedule.groups_per_batch / 8) * schedule.launched_members


def _ceiling(schedule: Schedule, view: MeshView, engines: EngineLoad) -> int:
    """Return the number of trajectories that the caches hold, from the lengths so far; at least one group."""
    prompt = min(schedule.longest_prompt_tokens, view.mean_prompt_bytes / _BYTES_PER_PROMPT_TOKEN)
    running = view.mean_cached_tokens
    if running is None:
        running = schedule.longest_trajectory_tokens / 2
    held = _CACHE_SHARE * engines.kv_token_capacity / (prompt + running + 1)
    return max(schedule.launched_members, math.floor(held))


def mean_cached_tokens(finished_lengths: Mapping[int, int]) -> float | None:
    """Return E[L^2] / (2 E[L]), the mean length so far of a running trajectory; None before the first has finished.

    ``finished_lengths`` has the number of finished trajectories by bucket of a quarter octave.
    """
    first = second = 0.0
    for bucket, count in finished_lengths.items():
        length = 2 ** ((bucket + 0.5) / 4) - 1
        first, second = first + count * length, second + count * length * length
    return second / (2 * first) if first else None
