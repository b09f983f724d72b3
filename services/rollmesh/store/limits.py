"""Fixed limits of a run, written once and read by every client."""

from dataclasses import asdict

from pydantic import TypeAdapter

from rollmesh.errors import Conflict, StoreError
from rollmesh.mesh import ResumeOrder, RunLimits
from rollmesh.store.redis_connection import Connection
from rollmesh.store.scripts import MAX_KEYS_PER_SCRIPT

_SETTINGS = {
    "group_size": "schedule.group_size",
    "groups_per_batch": "schedule.groups_per_batch",
    "max_staleness": "schedule.max_staleness",
    "max_attempts": "rollout.max_attempts",
    "session_ttl_ms": "1000 * store.session_ttl_seconds",
    "filter_zero_variance": "schedule.filter_zero_variance",
    "mask_old_segments": "schedule.on_stale=mask_old_segments",
    "train_steps": "trainer.train_steps",
    "resume_order": "schedule.resume_order as a number",
    "keeps_history": (
        "schedule.start_order=longest_expected, schedule.resume_order=nearest_end, or curriculum.sampler, planner or "
        "group_shaper"
    ),
    "window_groups": "schedule.window_groups",
    "most_members": "2 * (schedule.group_size + schedule.spare_members), or a larger curriculum.most_members",
    "has_rounds": "curriculum.planner or curriculum.group_shaper",
}
"""Run-file field of each limit, for error messages."""
_IN_WORDS = {
    "group_size": {"schedule.group_size", "schedule.harvest"},
    "mask_old_segments": {"schedule.on_stale"},
    "resume_order": {"schedule.resume_order"},
    **{
        name: {_SETTINGS[name]}
        for name in ("groups_per_batch", "max_staleness", "filter_zero_variance", "window_groups")
    },
    "most_members": {"schedule.group_size", "schedule.harvest", "schedule.spare_members"},
}
"""Fixed settings that explain a changed limit, by limit."""
_FIXED = "schedule."
"""How the names of fixed settings begin, and those of no limit."""

_LIMITS = TypeAdapter(RunLimits)
_RESUME_ORDERS = tuple(ResumeOrder)
"""The queue stores the position."""


class Limits:
    """The RunLimits of a run, cached after the first read because they never change."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._limits: RunLimits | None = None

    async def init_run(self, limits: RunLimits) -> None:
        """Write the limits of a new run; raises Conflict when the run exists with other limits."""
        try:
            await self._connection.run("init_run", 0, *_words(limits))
        except Conflict as error:
            raise Conflict(_named(str(error))) from error
        # A run that has begun to keep a history keeps it, also when it is continued without a use for it.
        self._limits = None
        await self.get()

    async def get(self) -> RunLimits:
        """Return the limits of the run; raises StoreError before ``init_run``."""
        if self._limits is None:
            keys = self._connection.keys
            raw = await self._connection.command("HGETALL", keys.single("limits"))
            if not raw:
                raise StoreError("the run has not been initialised: start its leader or trainer, which call init_run")
            values = {name.decode(): int(value) for name, value in raw.items()}
            meta = await self._connection.command("HGETALL", keys.single("meta"))
            fixed = ((name.decode(), value.decode()) for name, value in meta.items())
            limits = _LIMITS.validate_python(
                {
                    **values,
                    "session_ttl_seconds": values["session_ttl_ms"] / 1000,
                    "resume_order": _RESUME_ORDERS[values["resume_order"]],
                    "fixed_settings": [(name, value) for name, value in fixed if name.startswith(_FIXED)],
                }
            )
            self._limits = limits
            self._connection.restore_lost_run(_words(limits))
        return self._limits

    async def groups_per_call(self) -> int:
        """Return the most groups that one script may delete.

        A group has up to ``most_members`` members with two keys each, and four keys more.
        """
        limits = await self.get()
        members = limits.most_members or 2 * limits.group_size
        return max(1, MAX_KEYS_PER_SCRIPT // (2 * members + 8))


class QueuePart:
    """Operations on one part of the queue, over the connection of the run."""

    def __init__(self, connection: Connection, limits: Limits) -> None:
        self._connection = connection
        self._keys = connection.keys
        self._limits = limits


def _words(limits: RunLimits) -> list[str | int]:
    """Return the names and values that the script ``init_run`` writes."""
    fields = asdict(limits)
    fields["resume_order"] = _RESUME_ORDERS.index(limits.resume_order)
    fields["session_ttl_ms"] = 1000 * fields.pop("session_ttl_seconds")
    fixed = [word for setting in fields.pop("fixed_settings") for word in setting]
    return [word for name, value in fields.items() for word in (name, int(value))] + fixed


def _named(refusal: str) -> str:
    """Return the refusal of ``init_run`` with the names of the run file, each once."""
    parts = [part.partition(":") for part in refusal.split("; ")]
    changed = {name for name, _, _ in parts}
    parts = [part for part in parts if not changed & _IN_WORDS.get(part[0], set())]
    return "; ".join(f"{_SETTINGS.get(name, name)}{colon}{rest}" for name, colon, rest in parts)
