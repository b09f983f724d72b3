"""Ledger of the judge: trained groups and trajectories, their counts, their staleness, and gaps between steps."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .files import BatchFile, RecordedTrajectory, RunFiles, SealedFolder

_LAG_STEPS = 4
"""Steps beyond the staleness bound after which an admitted group must be trained or dropped."""
_SPARE_SHARES = {"rollpacker": 0.25}
"""Spare members of the presets that have them by default, as a share of the members of a group."""
_SPARE_GROUP_SHARES = {"rollpacker": 0.25}
"""Spare groups of the presets that set groups aside by default, as a share of groups_per_batch."""
_GROUPS_OF_ONE = {"sorted", "sorted_partial"}
"""Presets in which every trajectory is a group by default."""
_MASKS_OLD_TOKENS = {"kimi"}
"""Presets that train groups with tokens over the staleness bound, and mask these tokens."""
_MOST_MEMBERS_OF_DARS = {"et": 32, "hw": 64}
_OWN_MOST_PER_MEMBER = 8
"""Most members that a planner of a user's code launches, per member of schedule.group_size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedGroups:
    """Facts that follow from the files alone."""

    committed: int
    """Train step of the newest sound trainer state; 0 without one."""
    train_steps: Mapping[int, int]
    """Train step of every policy version that a manifest or a batch file names."""
    problems: tuple[str, ...]


def examine(run: RunFiles) -> TrainedGroups:
    """Check the files against the run file, as far as no model is needed."""
    sound = [state for state in run.states if not state.damage]
    newest = max(sound, key=lambda s: (s.record["rollback_count"], s.record["train_step"]), default=None)
    committed = 0 if newest is None else int(newest.record["train_step"])
    named, contradictions = _train_steps(run)
    found = [
        *contradictions,
        *_steps(run, committed),
        *_identities(run),
        *_members(run),
        *_staleness(run, named),
        *_policies(run, named),
        *_totals(run, newest, named),
        *_left_behind(run, committed),
        *_columns(run),
    ]
    return TrainedGroups(committed=committed, train_steps=named, problems=tuple(found))


def _train_steps(run: RunFiles) -> tuple[dict[int, int], list[str]]:
    named: dict[int, int] = {}
    problems: list[str] = []
    manifests = [(p.record["policy_version"], p.record["train_step"]) for p in run.policies if not p.damage]
    footers = [b.footer.get("version_train_steps", {}) for b in run.batches.values()]
    for version, step in (*manifests, *((int(v), s) for footer in footers for v, s in footer.items())):
        if named.setdefault(version, step) != step:
            problems.append(f"policy version {version} is of train step {named[version]} and of {step}")
    return named, problems


def _steps(run: RunFiles, committed: int) -> Iterator[str]:
    """Check that there are no gaps in the steps of batch files, states, announced policies and metrics."""
    for name, reason in run.damaged.items():
        yield f"{name}: {reason}"
    missing = [step for step in range(1, committed + 1) if step not in run.batches]
    if missing or not committed:
        yield f"train step {committed} is committed; there is no sound batch file of steps {missing}"
    for state in run.states:
        if state.damage:
            yield f"trainer state {state.folder.name}: {state.damage}"
    announced = max((p.train_step for p in run.policies if (p.folder / "ANNOUNCED").exists()), default=0)
    every, last = run.config["checkpoints"]["state_every_steps"], run.config["trainer"]["train_steps"]
    if committed < (announced if announced >= last else announced - announced % every):
        yield f"train step {committed} is committed, but a policy of step {announced} was announced"
    logged = [record["train_step"] for record in run.metrics]
    if logged and logged != list(range(1, len(logged) + 1)):
        yield f"metrics.jsonl has the steps {logged}"
    if logged and logged[-1] > max(run.batches, default=0):
        yield f"metrics.jsonl goes to step {logged[-1]}, sound batch files to {max(run.batches, default=0)}"


def _identities(run: RunFiles) -> Iterator[str]:
    """Check that every group, trajectory and prompt is trained at most once."""
    groups = Counter(group for batch in run.batches.values() for group, _ in batch.groups)
    yield from _more_than_once("group", groups)
    yield from _more_than_once("trajectory", Counter(t.trajectory_id for t in _trajectories(run)))
    epoch_of = {group: group.partition("-")[0] for group in groups}
    prompts = {(group, members[0].prompt_id) for b in run.batches.values() for group, members in b.groups if members}
    counts = Counter(f"{epoch_of[group]} {prompt}" for group, prompt in prompts)
    yield from _more_than_once("prompt", counts, group_rules(run.config).prompt_times)


def _more_than_once(kind: str, counts: Counter[str], times: float = 1) -> Iterator[str]:
    more = sorted(name for name, count in counts.items() if count > times)
    if more:
        often = "once" if times == 1 else f"{times:g} times"
        yield f"{len(more)} {kind}(s) were trained more than {often}: {', '.join(more[:5])}"


def _members(run: RunFiles) -> Iterator[str]:
    """Check that groups have all their members, and batches all their groups."""
    rules, batch_size = group_rules(run.config), run.config["schedule"]["groups_per_batch"]
    absent = 0
    for step, batch in run.batches.items():
        if len(batch.groups) != batch_size:
            yield f"train step {step} has {len(batch.groups)} groups, not {batch_size}"
        for group, members in batch.groups:
            indices = {t.member for t in members}
            absent += max(0, rules.least_members - len(indices))
            is_invalid = any(t.group_id != group or not t.scored or not t.written for t in members)
            if is_invalid or len(indices) != len(members) or not indices <= set(range(rules.most_members)):
                yield f"group {group} of train step {step} has members other than 0 to {rules.most_members - 1}"
    totals = run.metrics[-1]["mesh"]["totals"] if run.metrics else {}
    if absent > totals.get("unscorable_total", 0):
        yield f"{absent} member(s) of groups are missing, of which {totals.get('unscorable_total', 0)} had no score"


def _staleness(run: RunFiles, named: Mapping[int, int]) -> Iterator[str]:
    # docs/architecture.md: The staleness bound
    bound = run.config["schedule"]["max_staleness"]
    if bound is None:
        yield "the run file does not set schedule.max_staleness, so staleness was not checked"
        return
    most = math.inf if group_rules(run.config).masks_old_tokens else bound
    stale = [
        t.trajectory_id
        for step, batch in run.batches.items()
        for t in batch.trajectories
        if any(s.policy_version not in named or step - 1 - named[s.policy_version] > most for s in t.written)
    ]
    if stale:
        yield f"{len(stale)} trajectories are older than {most:g} steps, or of no known version: {', '.join(stale[:5])}"


def _policies(run: RunFiles, named: Mapping[int, int]) -> Iterator[str]:
    """Check that versions are unique, steps have one set of weights, and no trained token names a damaged version."""
    sound = Counter(p.record["policy_version"] for p in run.policies if not p.damage)
    yield from _more_than_once("policy version", Counter({str(version): count for version, count in sound.items()}))
    weights: dict[str, set[str]] = {}
    for policy in run.policies:
        # After a rollback a step is trained again: the session in the name ends with r and the number of rollbacks.
        name = f"{policy.train_step}{policy.folder.name.partition('-')[2].partition('r')[1:]}"
        digests = [f["sha256"] for f in policy.record.get("files", ()) if f["path"].endswith(".safetensors")]
        weights.setdefault(name, set()).update(digests)
    yield from (f"the policies of train step {step} differ" for step, found in weights.items() if len(found) > 1)
    damaged = [p for p in run.policies if p.damage]
    for version in sorted({s.policy_version for t in _trajectories(run) for s in t.written} - set(sound)):
        for policy in damaged:
            if _may_have_version(policy, version, named):
                yield f"policy version {version}, which trained tokens name: {policy.folder.name}: {policy.damage}"


def _may_have_version(policy: SealedFolder, version: int, named: Mapping[int, int]) -> bool:
    recorded = policy.record.get("policy_version")
    return recorded == version if isinstance(recorded, int) else policy.train_step == named.get(version)


def _totals(run: RunFiles, newest: SealedFolder | None, named: Mapping[int, int]) -> Iterator[str]:
    """Check that the newest state counts the same groups and tokens as the batch files up to its step.

    Tokens over the staleness bound are not trained where they are masked.
    """
    progress = {} if newest is None else newest.record["extra"].get("progress", {})
    if newest is None or not progress:
        return
    batches: list[BatchFile] = [b for step, b in run.batches.items() if step <= newest.record["train_step"]]
    most = run.config["schedule"]["max_staleness"] if group_rules(run.config).masks_old_tokens else None
    written = ((batch.train_step, s) for batch in batches for t in batch.trajectories for s in t.written)
    tokens = sum(len(s.token_ids) for step, s in written if most is None or step - 1 - named[s.policy_version] <= most)
    counts = {
        "groups": (sum(len(b.groups) for b in batches), sum(progress["trained_groups_by_length_decile"])),
        "tokens": (tokens, progress["trained_token_total"]),
    }
    masks = run.config["trainer"]["algorithm"].get("masks")
    for unit, (in_files, in_state) in counts.items():
        # Only the losses of the mesh know which tokens a mask takes out.
        if in_files < in_state if masks and unit == "tokens" else in_files != in_state:
            yield f"trainer state {newest.folder.name} counts {in_state} trained {unit}, its batch files {in_files}"


def _left_behind(run: RunFiles, committed: int) -> Iterator[str]:
    """Check that positions admitted long ago are trained, or counted as dropped in the metrics."""
    bound = run.config["schedule"]["max_staleness"]
    early = None if bound is None else run.batches.get(committed - bound - _LAG_STEPS)
    if early is None or early.footer["cursor_epoch"]:
        return
    trained = {group for batch in run.batches.values() for group, _ in batch.groups}
    absent = [g for g in (f"e0-{i}" for i in range(early.footer["cursor_index"])) if g not in trained]
    dropped = sum(run.metrics[-1]["mesh"]["dropped_groups"].values()) if run.metrics else 0
    if len(absent) > dropped + group_rules(run.config).most_aside:
        yield f"{len(absent)} groups admitted before train step {early.train_step} are lost: {', '.join(absent[:5])}"


def _columns(run: RunFiles) -> Iterator[str]:
    """Check that every trajectory has one column of a teacher, as long as the response, and a teacher one digest."""
    teachers = run.config.get("teachers") or {}
    digests: dict[str, set[str]] = {}
    wrong = []
    for trajectory in _trajectories(run):
        tokens = sum(len(segment.token_ids) for segment in trajectory.segments)
        for column in trajectory.columns:
            digests.setdefault(column.teacher, set()).add(column.digest)
        if len(trajectory.columns) != bool(teachers) or not all(
            column.teacher in teachers
            and len(column.logprobs) == tokens
            and len(column.top_logprobs) == tokens * teachers[column.teacher].get("top_k", 0)
            and np.isfinite([column.logprobs.sum(), column.top_logprobs.sum()]).all()
            for column in trajectory.columns
        ):
            wrong.append(trajectory.trajectory_id)
    if wrong:
        yield f"{len(wrong)} trajectories do not have one sound column of a teacher: {', '.join(wrong[:5])}"
    yield from (f"teacher {name} had {len(found)} models" for name, found in digests.items() if len(found) > 1)


def _trajectories(run: RunFiles) -> Iterable[RecordedTrajectory]:
    return (t for batch in run.batches.values() for t in batch.trajectories)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRules:
    """Rules of the run file about groups."""

    least_members: int
    """Members that a group has, apart from those without a score."""
    most_members: int
    """Members that the mesh launches in a group."""
    prompt_times: float
    """How often a prompt may be trained in an epoch; inf with a sampler."""
    masks_old_tokens: bool
    """Whether a group with tokens over the staleness bound is trained, without these tokens."""
    most_aside: int
    """Most groups that may wait for a long round: fewer than a batch, and those of the last short round."""


def group_rules(config: Mapping[str, Any]) -> GroupRules:
    """Return the rules of a run file, resolved or not."""
    schedule, curriculum = config["schedule"], config.get("curriculum") or {}
    preset, on_stale = schedule["preset"], schedule.get("on_stale")
    of_one = (schedule.get("harvest") or ("trajectory" if preset in _GROUPS_OF_ONE else "group")) == "trajectory"
    least, most = _member_counts(schedule, 1 if of_one else schedule["group_size"], curriculum)
    batch, spare = schedule["groups_per_batch"], schedule.get("spare_groups")
    if spare is None:
        spare = math.ceil(_SPARE_GROUP_SHARES.get(preset, 0.0) * batch)
    sets_aside = on_stale == "set_aside" or (on_stale is None and preset in _SPARE_GROUP_SHARES)
    has_sampler = (curriculum.get("sampler") or "order") != "order"
    return GroupRules(
        least_members=least,
        most_members=most,
        prompt_times=math.inf if has_sampler else schedule["group_size"] if of_one else 1,
        masks_old_tokens=on_stale == "mask_old_segments" or (on_stale is None and preset in _MASKS_OLD_TOKENS),
        most_aside=batch - 1 + spare if sets_aside else 0,
    )


def _member_counts(schedule: Mapping[str, Any], size: int, curriculum: Mapping[str, Any]) -> tuple[int, int]:
    """Return the least and the most members of a group."""
    options = curriculum.get("planner_options") or {}
    match curriculum.get("planner") or "single":
        case "single":
            spare = schedule.get("spare_members")
            if spare is None:
                spare = math.ceil(_SPARE_SHARES.get(schedule["preset"], 0.0) * size)
            return size, size + spare
        case "dars":
            largest = options.get("most_members") or _MOST_MEMBERS_OF_DARS[options.get("rule", "et")]
            return size, max(size, largest)
        case "quorum":
            return math.ceil(options.get("share", 0.95) * size - 1e-9), size
        case "spare":
            launched = options.get("factor", 1) * size + options.get("extra", 1)
            return launched, launched
        case _:
            return 1, _OWN_MOST_PER_MEMBER * size
