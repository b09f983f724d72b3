"""The queue model: operations of the leader and of the trainer, and the scheduler's view."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from rollmesh.errors import Conflict
from rollmesh.mesh import Desired, GroupView, MeshView, WasteReason
from rollmesh.scheduling.decide import Admit, BeginAgain, CutBatch, Evict, LeaderStep, Recall, SetDesired
from rollmesh.sim.queue_model.group_operations import RestartOperations, RoundOperations
from rollmesh.sim.queue_model.records import GroupState, ModelGroup, ModelRound
from rollmesh.sim.queue_model.state import QueueState
from rollmesh.sim.queue_model.worker_operations import WorkerOperations
from rollmesh.types import TrajectoryState

_STEPS = 256
"""Most train steps in ``unclaimed_by_step`` and ``ready_by_step``."""


class QueueModel(WorkerOperations, RestartOperations, RoundOperations):
    """The queue of one run."""

    def view(self, *, groups: bool = True, blocking: int = 0, shortest: bool = False) -> MeshView:
        """Return a view of the mesh: O(1) without single groups, else O(groups of a batch).

        With ``shortest`` groups it is O(ready groups). While open groups block the cut, as many of the stalest ones as
        ``blocking`` are enough (``blocking_groups``), and no ready ones.
        """
        open_groups, ready_groups = self.listed[GroupState.OPEN], self.listed[GroupState.READY]
        unclaimed = self.unclaimed
        totals, counts = self.totals, self.counts
        saved_bytes, finished = totals["saved_bytes_total"], totals["finished_total"]
        unfinished = counts[TrajectoryState.LEASED] + len(self.partial) + len(self.resting) + len(self.pending)
        expected = self.used_memory_bytes + (unfinished * saved_bytes / finished if finished else 0)
        bound = 2 * self.limits.groups_per_batch if groups else 0
        is_blocked = self.blocked_since is not None and self.blocked_since <= self.now
        return MeshView(
            now=self.now,
            trained_step=self.trained_step,
            cut_step=self.cut_step,
            policy_version=self.policy_version,
            policy_train_step=self.version_steps[-1] if self.version_steps else 0,
            admitted_unconsumed=self.admitted_unconsumed,
            open_groups=len(self.groups[GroupState.OPEN]),
            ready_groups=len(self.groups[GroupState.READY]),
            listed=groups,
            ready=_views(self, ready_groups.in_order(0 if blocking else bound, shortest=shortest)),
            stalest_open=_views(self, open_groups.stalest(blocking or bound)),
            unclaimed_by_step=_by_step(self, unclaimed, oldest=min(unclaimed, default=0)),
            ready_by_step=_by_step(self, ready_groups.steps, oldest=min(unclaimed, default=0)),
            pending=len(self.pending),
            partial=len(self.partial),
            resting=len(self.resting),
            leased=counts[TrajectoryState.LEASED],
            waiting=self.waiting.total(),
            finished=counts[TrajectoryState.FINISHED],
            memory_ratio=expected / self.max_memory_bytes if self.max_memory_bytes else 0.0,
            used_memory_bytes=self.used_memory_bytes,
            max_memory_bytes=self.max_memory_bytes,
            saved_bytes_total=saved_bytes,
            finished_total=finished,
            mean_prompt_bytes=totals["prompt_bytes_total"] / max(1, totals["prompts_total"]),
            filtered_in_a_row=self.filtered_in_a_row,
            unscored_in_a_row=self.unscored_in_a_row,
            blocked_by=self.blocked_by if is_blocked else "",
            blocked_since=self.blocked_since if is_blocked else None,
            registered_generators=self.registered_generators,
            desired=self.desired,
            ready_seconds=self.times.ready_seconds,
            ready_updates=self.times.ready_updates,
            update_seconds=self.times.update_seconds,
            undecided_groups=len(self.undecided),
            aside_groups=len(self.groups[GroupState.ASIDE]),
            recalled_groups=self.recalled_groups,
            aside=tuple(group.group_id for group in self.oldest_aside(bound)),
            failure=self.failure,
            recovering=self.recovering,
            user_paused=self.user_paused,
            launcher_paused=self.launcher_paused,
            is_complete=self.trained_step >= self.limits.train_steps,
        )

    # -- leader ----------------------------------------------------------------------------------------------------
    def apply(self, step: LeaderStep) -> int:
        """Apply a step of the leader but an admission, which needs prompts; returns the number of groups it changes."""
        match step:
            case SetDesired(desired, blocked_by):
                self.set_desired(desired, blocked_by)
            case Evict(group_ids, reason):
                return self.evict(group_ids, reason)
            case BeginAgain(group_ids, reason):
                return len(self.begin_again(group_ids, aside=reason is WasteReason.SET_ASIDE))
            case CutBatch(group_ids):
                self.cut(self.cut_step + 1, group_ids)
                return len(group_ids)
            case Recall(count):
                return self.recall(self.cut_step + 1, count)
            case Admit():
                raise ValueError("an admission needs prompts: call admit for each of its groups")
        return 0

    def set_desired(self, desired: Desired, blocked_by: str = "") -> None:
        """Write the desired state; a set of groups that blocks the cut blocks from the first call that names it."""
        self.desired = desired
        is_late = self.blocked_since is not None and self.blocked_since > self.now
        if blocked_by != self.blocked_by or is_late:
            self.blocked_since = self.now if blocked_by else None
            self.blocked_by = blocked_by

    def change_leader(self) -> None:
        """Forget since when groups block the cut: the straggler time-out does not run without a leader."""
        self.blocked_by, self.blocked_since = "", None

    def admit(
        self,
        group_id: str,
        needed: int,
        *,
        spare: int = 0,
        prompt_bytes: int = 0,
        prompt_id: str = "",
        domain: str = "",
        expected_tokens: float | None = None,
        start_rank: int | None = None,
        plan: str | None = None,
    ) -> ModelGroup:
        """Open a group with ``needed + spare`` pending trajectories; raises Conflict for an id that is known.

        Its prompt has a history if the run keeps one. With the plan of its first round (JSON) the leader decides at the
        end of each of its rounds.
        """
        if group_id in self.ended or self.find_group(group_id) is not None:
            raise Conflict(f"group {group_id} was admitted before: every group needs another id")
        self.admitted += 1
        group = ModelGroup(
            group_id,
            self.admitted,
            needed,
            spare,
            prompt_id=prompt_id if self.limits.keeps_history else "",
            domain=domain if self.limits.keeps_history else "",
            expected_tokens=expected_tokens,
            start_rank=start_rank,
            rounds=[] if plan is None else [ModelRound(0, needed, needed + spare, plan)],
            admitted_at=self.now,
        )
        self.add_group(group)
        for _ in range(needed + spare):
            self.add_member(group)
        self.totals["admitted_total"] += 1
        self.totals["prompts_total"] += 1
        self.totals["prompt_bytes_total"] += prompt_bytes
        return group

    def evict(self, group_ids: Sequence[str], reason: str) -> int:
        """Drop groups that are open, ready or aside; returns the number of dropped groups."""
        found = [self.find_group(group_id) for group_id in group_ids]
        dropped = [group for group in found if group is not None and group.state is not GroupState.CUT]
        for group in dropped:
            if group.state is not GroupState.READY:
                self.history.note(group, self.trained_step, is_evicted=True)
            self.drop(group, reason)
        self.totals["evicted_total"] += len(dropped)
        return len(dropped)

    def cut(self, train_step: int, group_ids: Sequence[str]) -> None:
        """Fix a batch; raises Conflict unless its step is next and its groups are ready and within the bound."""
        if not self.cut_step + 1 == self.trained_step + 1 == train_step:
            raise Conflict(f"cut {train_step}: cut_step is {self.cut_step}, trained_step is {self.trained_step}")
        ready = self.groups[GroupState.READY]
        oldest = train_step - 1 - self.limits.max_staleness
        for group_id in group_ids:
            if group_id not in ready:
                raise Conflict(f"cut {train_step}: group {group_id} is not ready")
            step = ready[group_id].step
            if not self.limits.mask_old_segments and step is not None and step < oldest:
                raise Conflict(
                    f"cut {train_step}: group {group_id} has staleness {train_step - 1 - step}, over the bound of "
                    f"{self.limits.max_staleness}"
                )
        if len(set(group_ids)) < len(group_ids):
            raise Conflict(f"cut {train_step}: a group is listed twice")
        for group_id in group_ids:
            self.move_group(ready[group_id], GroupState.CUT)
        self.batch, self.batch_is_confirmed, self.cut_step = tuple(group_ids), False, train_step
        self.blocked_by, self.blocked_since = "", None
        self.totals["cuts_total"] += 1
        self.times.cut(self.now)

    # -- trainer ---------------------------------------------------------------------------------------------------
    def announce(self, train_step: int, *, rollback_count: int = 0) -> int:
        """Announce the next policy version; one after a rollback, or of the same train step, begins a new branch."""
        version = len(self.version_steps)
        if version and (train_step <= self.version_steps[-1] or rollback_count > self.rollback_count):
            self.branch_version = version
        self.rollback_count = rollback_count
        self.version_steps.append(train_step)
        self.times.announced(self.now)
        return version

    def claim(self) -> list[ModelGroup]:
        """Return the groups of the batch that is cut and not confirmed, in order."""
        return [] if self.batch_is_confirmed else [self.groups[GroupState.CUT][name] for name in self.batch]

    def confirm_batch_file(self) -> None:
        """Confirm the batch file of the cut: the members of its groups are deleted."""
        for group in self.claim():
            self.delete_members(group)
        self.batch_is_confirmed = bool(self.batch)

    def report_trained(self) -> None:
        """Consume the confirmed batch; raises Conflict without one."""
        if not self.batch_is_confirmed:
            raise Conflict(f"trained {self.cut_step}: its batch file has not been confirmed")
        for group_id in self.batch:
            del self.groups[GroupState.CUT][group_id]
            self.ended[group_id] = "consumed"
        self.totals["consumed_total"] += len(self.batch)
        self.batch, self.batch_is_confirmed, self.trained_step = (), False, self.cut_step
        self.times.trained()


def _views(state: QueueState, groups: Iterable[GroupView]) -> tuple[GroupView, ...]:
    if not state.limits.mask_old_segments:
        return tuple(groups)
    # Tokens older than the bound are masked out of the loss, so they do not count.
    oldest = state.trained_step - state.limits.max_staleness
    return tuple(
        group
        if group.min_train_step is None or group.min_train_step >= oldest
        else replace(group, min_train_step=oldest)
        for group in groups
    )


def _by_step(state: QueueState, groups: Mapping[int, int], *, oldest: int) -> tuple[tuple[int, int], ...]:
    """Return the numbers of groups by step, of the steps from the oldest one on that a view covers."""
    if not groups:
        return ()
    newest = min(state.version_steps[-1], oldest + _STEPS - 1)
    return tuple(sorted((step, count) for step, count in groups.items() if step <= newest))
