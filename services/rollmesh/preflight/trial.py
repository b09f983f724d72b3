"""Trial of a run's inputs: open the prompts, call the user's methods, build the verifiers, score the first rows.

User code may hang, exit or take gigabytes, so it runs in a process of its own, ``python -m rollmesh.preflight.trial
RUN_FILE RESULT``, with the secrets in the environment, which writes its error and its hints to the file RESULT.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rollmesh.agents.chat_format import check_named_format
from rollmesh.config import RunConfig, load_run_config, write_run_config
from rollmesh.config.data import PythonSource
from rollmesh.config.load import inherited_environment, secret_environment
from rollmesh.config.methods import is_own
from rollmesh.curriculum.budgets import load_budget
from rollmesh.curriculum.planners import RoundRules
from rollmesh.curriculum.prompt_tables import Draw, HistoryTable, prompt_table
from rollmesh.curriculum.samplers import load_sampler
from rollmesh.errors import ConfigError, DataError, RollmeshError, VerifierError
from rollmesh.group_outcome import GroupOutcome, MemberOutcome
from rollmesh.preflight.run_model import RunModel
from rollmesh.prompt_history import PromptRecord, domain_record
from rollmesh.reward.scored_answer import prompt_metadata
from rollmesh.scheduling import Schedule
from rollmesh.tasks.environments.environment_protocol import (
    Environment,
    EnvironmentFailed,
    EnvironmentReply,
    SnapshotEnvironment,
    checked_reply,
    checked_snapshot,
    environment_factory,
    load_agent,
)
from rollmesh.tasks.sources.source_protocol import RowSource, Split, build_prompt_source
from rollmesh.tasks.verifiers.verifier_protocol import BUILT_IN, Verifier, build_verifier, checked_reward
from rollmesh.text import Tokenizer
from rollmesh.types import Prompt
from rollmesh.user_code import described, own_code

TRIAL_SECONDS = 60.0
"""Time limit of the process; a slower input is checked by its service."""
FIRST_ROWS = 1024
"""Rows of a table that the trial checks; the rollout worker checks the others when it starts."""
_FIRST_PROMPTS = 64
"""Prompts among which the trial looks for one of each part and each verifier of a mixed data set."""
_MOST_SCORED = 8
_NOT_SCORED = frozenset({"http_judge", "python_code"})
"""Built-in verifiers that may call a server or a sandbox; only their options are checked."""
_SEEN = PromptRecord(groups=1, members=4, solved=1, reward_sum=1.0, token_sum=400, longest=200, train_step=0)
_OF_FILES = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError)


def runs_in_a_process(config: RunConfig) -> bool:
    """Tell whether the trial may run code of the user's, or of a library that reads the data."""
    # A part of a composite verifier may be the user's.
    built_in = config.reward.verifier != "composite" and not own_names(config)
    is_turns = config.rollout.program == "environment"
    return not built_in or is_turns or any(source.type != "countdown" for source in config.data.sources.values())


def own_names(config: RunConfig) -> list[str]:
    """Return what a run names of the user's own code, without the parts of a composite verifier."""
    section = config.curriculum
    names = [section.sampler, section.planner, section.group_shaper, section.token_budget, section.turn_budget]
    names += [*_algorithm_names(config), config.reward.verifier]
    names += [source.target for source in config.data.sources.values() if isinstance(source, PythonSource)]
    if config.rollout.program == "environment":
        names.append(config.rollout.environment)
    if config.rollout.program == "agent":
        names.append(config.rollout.agent.function or "")
    return [name for name in names if ":" in name]


def _algorithm_names(config: RunConfig) -> list[str]:
    algorithm = config.trainer.algorithm
    return [algorithm.advantage, algorithm.loss, *(mask.name for mask in algorithm.masks)]


def try_inputs_in_a_process(config: RunConfig) -> list[str]:
    """Do what ``try_inputs`` does in a process of its own; return its hints, or raise its error."""
    with tempfile.TemporaryDirectory(prefix="rollmesh-trial-") as folder:
        run, result, log = Path(folder, "run.yaml"), Path(folder, "result"), Path(folder, "log")
        write_run_config(config, run)
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "rollmesh.preflight.trial", str(run), str(result)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**inherited_environment(), **secret_environment(config), "TOKENIZERS_PARALLELISM": "false"},
            )
        try:
            process.wait(timeout=TRIAL_SECONDS)
        except subprocess.TimeoutExpired:
            return [
                f"data and reward.verifier={config.reward.verifier}: one row was not opened and scored within "
                f"{TRIAL_SECONDS:.0f} s, so they are checked by their services"
            ]
        finally:
            # Also the processes that the user's code started.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if not result.exists():  # its own code has ended it
            lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
            last = next((line for line in reversed(lines) if line.strip()), "it printed nothing").strip()
            tried = ", ".join(own_names(config)) or f"data.source and reward.verifier={config.reward.verifier}"
            status = process.returncode
            raise ConfigError(f"the trial of {tried} ended its process with status {status}; the last line: {last}")
        outcome = json.loads(result.read_text(encoding="utf-8"))
    if (error := outcome["error"]) is not None:
        kind: type[RollmeshError] = DataError if error[0] == "DataError" else ConfigError
        raise kind(error[1])
    return list(outcome["hints"])


def main() -> None:
    """Try the run file that the command line names first, and write its error to the file that it names second."""
    run, result = Path(sys.argv[1]), Path(sys.argv[2])
    config = load_run_config(run)

    def end(error: list[str] | None, hints: list[str]) -> None:
        result.write_text(json.dumps({"error": error, "hints": hints}), encoding="utf-8")
        # The user's code may have left threads that never end.
        os._exit(0)

    error, hints = None, []
    try:
        model = RunModel(config)
        model.check_template_variables()
        hints = try_inputs(model, late=lambda message: end(["ConfigError", message], []))
    except (ConfigError, DataError) as problem:
        error = [type(problem).__name__, str(problem)]
    end(error, hints)


def try_inputs(model: RunModel, late: Callable[[str], None] | None = None) -> list[str]:
    """Open the prompts, call the methods, build the verifiers, and score answers to the first rows; return hints.

    Raises ConfigError or DataError that names the field, or the row. ``late`` is called from another thread with the
    error of a verifier that does not return.
    """
    config, tokenizer = model.config, model.tokenizer
    source, prompt = _opened(model, "train")
    try_methods(config, source)
    scored = _of_each_kind(config, source, prompt)
    if config.evaluation.before_and_after or config.evaluation.every_versions:
        _, evaluated = _opened(model, "eval")
        scored += [evaluated] if config.data.evaluation_source is not None else []
    if config.rollout.program == "environment":
        try_environment(config, prompt, ["", str(prompt.metadata.get("answer", "1"))])
    if config.rollout.program == "agent" and config.rollout.agent.function is not None:
        load_agent(config.rollout.agent.function, config.rollout.agent.function_options)
    if config.rollout.program == "agent" or config.agents.enabled:
        check_named_format(config.agents, tokenizer, config.data.chat_template_kwargs)
    for scored_prompt in scored:
        _score_prompt(late, config, scored_prompt, tokenizer)
    return list(_hints(config, tokenizer, prompt))


def _opened(model: RunModel, split: Split) -> tuple[RowSource, Prompt]:
    config = model.config
    field = "evaluation_source" if split == "eval" and config.data.evaluation_source is not None else "source"
    try:
        source = build_prompt_source(config.data, model.tokenizer, config.seed, split, first_rows=FIRST_ROWS)
        return source, source.prompt(0, 0)
    except RollmeshError as error:
        if str(error).startswith("data."):
            raise
        raise type(error)(f"data.{field}: {error}") from error
    except Exception as error:
        raise DataError(f"data.{field}: {described(error)}") from error


def _of_each_kind(config: RunConfig, source: RowSource, first: Prompt) -> list[Prompt]:
    """Return the first prompt, and of mixed data one of each part and each verifier that rows name."""
    found = {(first.verifier, first.domain): first}
    is_mixed = config.data.source.type == "mixture" or any(s.rows_name_verifiers for s in config.data.sources.values())
    for index in range(1, min(source.epoch_size, _FIRST_PROMPTS) if is_mixed else 1):
        prompt = source.prompt(0, index)
        found.setdefault((prompt.verifier, prompt.domain), prompt)
    return list(found.values())[:_MOST_SCORED]


def _score_prompt(late: Callable[[str], None] | None, config: RunConfig, prompt: Prompt, tokenizer: Tokenizer) -> None:
    name = prompt.verifier or config.reward.verifier
    options = config.reward.options if name == config.reward.verifier else {}
    built = build_verifier(name, options)
    for part, part_options in _scored_parts(name, options):
        # The rewards of agents and environments may come from elsewhere, unless the user wrote a verifier for them.
        scored = config.rollout.program == "single_turn" or part not in BUILT_IN
        if scored and config.reward.on_error != "fixed":
            verifier = built if part == name else build_verifier(part, part_options)
            _score(late, config, part, verifier, prompt, tokenizer)


def _scored_parts(name: str, options: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield name and options of a verifier, or of the parts of a composite one, without those that call others."""
    if name == "composite":
        for part in options["parts"].values():
            yield from _scored_parts(part["verifier"], part.get("options") or {})
    elif name not in _NOT_SCORED:
        yield name, options


def _score(
    late: Callable[[str], None] | None,
    config: RunConfig,
    name: str,
    verifier: Verifier,
    prompt: Prompt,
    tokenizer: Tokenizer,
) -> None:
    """Score a right answer where the row has one, the same in another spelling, and wrong ones.

    A verifier of the user's is refused only if every answer fails but the reference itself: some reject some answers
    on purpose. A built-in one is refused if any fails, because its errors are about the row.
    """
    metadata = prompt_metadata(prompt, verifier, tokenizer)
    right = prompt.metadata.get("answer", "1")
    right = right[0] if isinstance(right, list) and right else right
    spelled = f"The answer is \\boxed{{ {right} }}."
    answers = [str(right), spelled, "\\boxed{no}", tokenizer.decode(prompt.token_ids), "", "answer"]
    errors: list[str] = []
    for index, answer in enumerate(answers):
        try:
            with _watched(late, config, name, prompt):
                checked_reward(verifier.verify(answer, metadata), name)
            if name not in BUILT_IN and index:
                return
        except (Exception, SystemExit) as error:
            if name not in BUILT_IN and _is_unreachable(error):
                return
            # VerifierError is a sentence; any other exception needs its class.
            errors.append(str(error) if isinstance(error, RollmeshError) else described(error))
    if not errors:
        return
    own = "" if name in BUILT_IN else "; call it with these arguments in Python to debug it"
    raise ConfigError(
        f"reward.verifier={name}: fails for {len(errors)} of {len(answers)} trial answers to {prompt.prompt_id}, whose "
        f"metadata has {', '.join(metadata) or 'no field'}; the last error: {errors[-1]}{own}"
    )


@contextlib.contextmanager
def _watched(late: Callable[[str], None] | None, config: RunConfig, name: str, prompt: Prompt) -> Iterator[None]:
    """Call ``late`` with an error if the block takes more than twice the time that a worker would give it.

    The block stays in its thread: a verifier may use signals.
    """
    if late is None:
        yield
        return
    seconds = 2 * config.reward.timeout_seconds + 1
    message = (
        f"reward.verifier={name}: an answer to {prompt.prompt_id} was not scored within {seconds:g} s; raise "
        f"reward.timeout_seconds={config.reward.timeout_seconds:g}, or find what the verifier waits for"
    )
    timer = threading.Timer(seconds, late, [message])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _is_unreachable(error: BaseException | None) -> bool:
    """Tell whether a service that the user's code calls could not be reached: it may start later."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return isinstance(error, OSError) and not isinstance(error, _OF_FILES)


def _hints(config: RunConfig, tokenizer: Tokenizer, prompt: Prompt) -> Iterator[str]:
    path = f"model.path={config.model.path}"
    if unknown := sum(int(token == tokenizer.unknown_token_id) for token in prompt.token_ids):
        yield (
            f"hint: data.source: {unknown} of {len(prompt.token_ids)} tokens of {prompt.prompt_id} are unknown to the "
            f"tokenizer of {path}, and all look alike to the model: write prompts in its words (tokenizer.json), or "
            "use another model"
        )
    if ignored := tokenizer.ignored_eos_token_ids:
        yield (
            f"hint: {path}: eos_token_id {', '.join(map(str, ignored))} is outside the vocabulary of "
            f"{tokenizer.vocab_size} tokens, so it is ignored: correct generation_config.json or config.json"
        )
    if not tokenizer.eos_token_ids:
        yield (
            f"hint: {path}: the model has no end token, so every answer has rollout.max_new_tokens="
            f"{config.rollout.max_new_tokens} tokens and counts as truncated: set eos_token_id in "
            "generation_config.json"
        )
    for name, source in config.data.sources.items():
        if tokenizer.has_chat_template and getattr(source, "chat", True) is False:
            yield (
                f"hint: data.{name}.chat=false, but {path} has a chat template: an instruction model that gets plain "
                "text answers badly, and may never end; set chat: true"
            )


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


def _try_sampler(config: RunConfig, source: RowSource) -> None:
    """Draw without a history and with one. The trial's table may be the first rows only, so any row is accepted."""
    sampler, rows = load_sampler(config.curriculum), source.rows()
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
    rules = RoundRules.from_config(config, group_size=schedule.group_size, spare_members=schedule.spare_members)
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
            rules.shaper(group, records)


def try_environment(config: RunConfig, prompt: Prompt, texts: Iterable[str]) -> None:
    """Play one turn with each text in an environment of its own. Raises ConfigError with field, file and line.

    A service that the environment cannot reach yet is no error.
    """
    name = config.rollout.environment
    make = environment_factory(name, config.rollout.environment_options)
    where = f"rollout.environment={name}"
    for turn, text in enumerate(texts):
        try:
            with own_code(where, ConfigError):
                reply = asyncio.run(_play(make(), prompt, text, f"trial:{turn}"))
            if reply.reward is not None:
                checked_reward(reply.reward, where)
        except (ConfigError, EnvironmentFailed) as error:
            if _is_unreachable(error):
                return
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{where}: {error}") from error
        except DataError as error:
            raise ConfigError(f"{where}: {error}") from error
        except VerifierError as error:
            raise ConfigError(f"{error}") from error


async def _play(environment: Environment, prompt: Prompt, text: str, key: str) -> EnvironmentReply:
    try:
        if (first := await environment.reset(prompt)) is not None:
            checked_reply(first, "reset")
        reply = checked_reply(await environment.step(text, key))
        if not environment.replayable and isinstance(environment, SnapshotEnvironment):
            checked_snapshot(environment.snapshot())
        return reply
    finally:
        await environment.aclose()


if __name__ == "__main__":
    main()
