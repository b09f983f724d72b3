"""Trial of a user's methods: each is loaded, and called once or twice with small real inputs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from rollmesh.config import RunConfig
from rollmesh.config.data import PythonSource
from rollmesh.config.methods import is_own
from rollmesh.curriculum.budgets.budget_registry import load_budget
from rollmesh.curriculum.history_table import HistoryTable, prompt_table
from rollmesh.curriculum.round_rules import RoundRules
from rollmesh.curriculum.sampler_protocol import Draw
from rollmesh.errors import ConfigError, DataError, VerifierError
from rollmesh.group_outcome import GroupOutcome, MemberOutcome
from rollmesh.prompt_history import PromptRecord, domain_record
from rollmesh.rollout.sampler_binding import bind_sampler
from rollmesh.scheduling import Schedule
from rollmesh.tasks.environments.environment_protocol import (
    Environment,
    EnvironmentReply,
    SnapshotEnvironment,
    checked_reply,
    checked_snapshot,
    environment_factory,
)
from rollmesh.tasks.sources.source_protocol import RowSource
from rollmesh.tasks.verifiers.verifier_protocol import checked_reward
from rollmesh.types import Prompt
from rollmesh.user_code import own_code

_SEEN = PromptRecord(groups=1, members=4, solved=1, reward_sum=1.0, token_sum=400, longest=200, train_step=0)
_OF_FILES = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError)


def own_names(config: RunConfig) -> list[str]:
    """Return what a run names of the user's own code, without the parts of a composite verifier."""
    section = config.curriculum
    names = [section.sampler, section.planner, section.group_shaper, section.token_budget, section.turn_budget]
    names += [*_algorithm_names(config), config.reward.verifier]
    names += [source.target for source in config.data.sources.values() if isinstance(source, PythonSource)]
    if config.rollout.program == "environment":
        names.append(config.rollout.environment)
    return [name for name in names if ":" in name]


def try_methods(config: RunConfig, source: RowSource) -> None:
    """Call every method of the user's own code. Raises ConfigError or DataError with field, file and line."""
    section = config.curriculum
    if is_own(section.sampler):
        _try_sampler(config, source)
    if is_own(section.planner) or is_own(section.group_shaper):
        _try_rounds(config)
    for field in ("token_budget", "turn_budget"):
        if is_own(name := getattr(section, field)):
            most, steps = config.rollout.max_new_tokens, config.trainer.train_steps
            load_budget(field, name, getattr(section, f"{field}_options"), most=most, train_steps=steps)
    if any(map(is_own, _algorithm_names(config))):
        # It imports torch, which takes seconds.
        from rollmesh.trainer.learner.algorithm_trial import try_algorithm

        try_algorithm(config)


def try_environment(config: RunConfig, prompt: Prompt, texts: Iterable[str]) -> None:
    """Play one turn with each text in an environment of its own. Raises ConfigError with field, file and line.

    A service that the environment cannot reach yet is no error.
    """
    name = config.rollout.environment
    make = environment_factory(name, config.rollout.environment_options)
    if ":" not in name:
        return
    where = f"rollout.environment={name}"
    for turn, text in enumerate(texts):
        try:
            with own_code(where, ConfigError):
                reply = asyncio.run(_play(make(), prompt, text, f"trial:{turn}"))
        except ConfigError as error:
            if is_unreachable(error):
                return
            raise
        except DataError as error:
            raise ConfigError(f"{where}: {error}") from error
        if reply.reward is not None:
            try:
                checked_reward(reply.reward, where)
            except VerifierError as error:
                raise ConfigError(f"{error}") from error


def is_unreachable(error: BaseException | None) -> bool:
    """Tell whether a service that the user's code calls could not be reached: it may start later."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return isinstance(error, OSError) and not isinstance(error, _OF_FILES)


async def _play(environment: Environment, prompt: Prompt, text: str, key: str) -> EnvironmentReply:
    try:
        await environment.reset(prompt)
        reply = checked_reply(await environment.step(text, key))
        if not environment.replayable and isinstance(environment, SnapshotEnvironment):
            checked_snapshot(environment.snapshot())
        return reply
    finally:
        await environment.aclose()


def _algorithm_names(config: RunConfig) -> list[str]:
    algorithm = config.trainer.algorithm
    return [algorithm.advantage, algorithm.loss, *(mask.name for mask in algorithm.masks)]


def _try_sampler(config: RunConfig, source: RowSource) -> None:
    """Draw without a history and with one. The trial's table may be the first rows only, so any row is accepted."""
    sampler, rows = bind_sampler(config.curriculum), source.rows()
    assert sampler is not None
    table = prompt_table(rows.names, rows.domains, rows.endless, rows.weights)
    history = HistoryTable(table)
    for index in range(2):
        if sampler.number(Draw(epoch=0, index=index, seed=config.seed), table, history.columns, index) < 0:
            raise DataError(f"curriculum.sampler={sampler.name} named a row below 0")
        history.update(dict.fromkeys((*rows.names[:1], *map(domain_record, table.domains)), _SEEN))


def _try_rounds(config: RunConfig) -> None:
    """Begin a group with and without a record, and end it with its members scored."""
    schedule = Schedule.from_config(config)
    size = schedule.group_size
    rules = RoundRules.from_config(config, group_size=size, spare_members=schedule.spare_members)
    assert rules is not None
    rules.first(_SEEN)
    first = rules.first(None)
    rules.encode_plan(first)
    members = tuple(
        MemberOutcome(
            member_index=i, round=0, outcome=i % 2, shaped_reward=i % 2, token_count=10 + i, truncated=i % 4 == 3
        )
        for i in range(first.needed)
    )
    group = GroupOutcome(
        group_id="trial", prompt_id="trial", domain="", train_step=1, round=0, launched=first.launched, members=members
    )
    for records in ({}, {"trial": _SEEN}):
        rules.decide(group, records)
        if rules.planner is not None:  # its next round may have put off the shaper
            with own_code(f"curriculum.group_shaper={rules.shaper_name}"):
                rules.shaper(group, records)
