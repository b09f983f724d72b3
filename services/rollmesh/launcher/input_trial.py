"""Trial of a run's inputs: open the prompts, call the user's methods, build the verifier, score one row.

User code may hang, exit or take gigabytes, so the launcher runs ``python -m rollmesh.launcher.input_trial RUN_FILE
RESULT`` as a process of its own, with the secrets in the environment, and reads error and hints from the file RESULT.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rollmesh.config import RunConfig, load_run_config
from rollmesh.config.recipes import resolve_model
from rollmesh.errors import ConfigError, DataError, RollmeshError
from rollmesh.launcher.method_trial import is_unreachable, try_environment, try_methods
from rollmesh.reward.scored_answer import prompt_metadata
from rollmesh.tasks.sources.source_protocol import RowSource, Split, build_prompt_source
from rollmesh.tasks.verifiers.verifier_protocol import BUILT_IN, Verifier, build_verifier, checked_reward
from rollmesh.text import Tokenizer
from rollmesh.types import Prompt
from rollmesh.user_code import described

FIRST_ROWS = 1024
"""Rows of a table that the trial checks; the rollout worker checks the others when it starts."""
_FIRST_PROMPTS = 64
"""Prompts among which the trial looks for one of each part and each verifier of a mixed data set."""
_MOST_SCORED = 8
_NOT_SCORED = frozenset({"http_judge", "python_code"})
"""Built-in verifiers that may call a server or a sandbox; only their options are checked."""


def try_inputs(config: RunConfig, late: Callable[[str], None] | None = None) -> list[str]:
    """Open the prompts, call the methods, build the verifiers, and score answers to the first rows; return hints.

    Raises ConfigError or DataError that names the field, or the row. ``late`` is called from another thread with the
    error of a verifier that does not return. A verifier of the user's is refused only if every trial answer fails but
    the reference itself: some reject some answers on purpose. A built-in one is refused if any fails, because its
    errors are about the row.
    """
    tokenizer = Tokenizer(resolve_model(config.model.path))
    source, prompt = _opened(config, tokenizer, "train")
    try_methods(config, source)
    scored = _of_each_kind(config, source, prompt)
    if config.evaluation.before_and_after or config.evaluation.every_versions:
        _, evaluated = _opened(config, tokenizer, "eval")
        scored += [evaluated] if config.data.evaluation_source is not None else []
    if config.rollout.program == "environment":
        try_environment(config, prompt, ["", str(prompt.metadata.get("answer", "1"))])
    for scored_prompt in scored:
        _score_prompt(late, config, scored_prompt, tokenizer)
    return [*_unknown_words(config, tokenizer, prompt), *_end_hints(config, tokenizer), *_chat_hints(config, tokenizer)]


def _of_each_kind(config: RunConfig, source: RowSource, first: Prompt) -> list[Prompt]:
    """Return the first prompt, and of mixed data one of each part and each verifier that rows name."""
    found = {(first.verifier, first.domain): first}
    is_mixed = config.data.source.type == "mixture" or any(s.rows_name_verifiers for s in config.data.sources.values())
    for index in range(1, min(source.epoch_size, _FIRST_PROMPTS) if is_mixed else 1):
        prompt = source.prompt(0, index)
        found.setdefault((prompt.verifier, prompt.domain), prompt)
    return list(found.values())[:_MOST_SCORED]


def _score_prompt(late: Callable[[str], None] | None, config: RunConfig, prompt: Prompt, tokenizer: Tokenizer) -> None:
    """Build the verifier of a prompt, and score answers with it and with its parts."""
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


def _unknown_words(config: RunConfig, tokenizer: Tokenizer, prompt: Prompt) -> list[str]:
    unknown = sum(int(token == tokenizer.unknown_token_id) for token in prompt.token_ids)
    if not unknown:
        return []
    return [
        f"hint: data.source: {unknown} of {len(prompt.token_ids)} tokens of {prompt.prompt_id} are unknown to the "
        f"tokenizer of model.path={config.model.path}, and all look alike to the model: write prompts in its words "
        "(tokenizer.json), or use another model"
    ]


def _end_hints(config: RunConfig, tokenizer: Tokenizer) -> Iterator[str]:
    path = f"model.path={config.model.path}"
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


def _chat_hints(config: RunConfig, tokenizer: Tokenizer) -> Iterator[str]:
    for name, source in config.data.sources.items():
        if tokenizer.has_chat_template and getattr(source, "chat", True) is False:
            yield (
                f"hint: data.{name}.chat=false, but model.path={config.model.path} has a chat template: an instruction "
                "model that gets plain text answers badly, and may never end; set chat: true"
            )


def _opened(config: RunConfig, tokenizer: Tokenizer, split: Split) -> tuple[RowSource, Prompt]:
    """Open the prompts of a split, and return them with the first one."""
    field = "evaluation_source" if split == "eval" and config.data.evaluation_source is not None else "source"
    try:
        source = build_prompt_source(config.data, tokenizer, config.seed, split, first_rows=FIRST_ROWS)
        return source, source.prompt(0, 0)
    except RollmeshError as error:
        if str(error).startswith("data."):
            raise
        raise type(error)(f"data.{field}: {error}") from error
    except Exception as error:
        raise DataError(f"data.{field}: {described(error)}") from error


def _score(
    late: Callable[[str], None] | None,
    config: RunConfig,
    name: str,
    verifier: Verifier,
    prompt: Prompt,
    tokenizer: Tokenizer,
) -> None:
    metadata = prompt_metadata(prompt, verifier, tokenizer)
    errors: list[str] = []
    answers = list(_trial_answers(prompt, tokenizer))
    for answer in answers:
        try:
            with _watched(late, config, name, prompt):
                checked_reward(verifier.verify(answer, metadata), name)
            if name not in BUILT_IN and answer is not answers[0]:
                return
        except (Exception, SystemExit) as error:
            if name not in BUILT_IN and is_unreachable(error):
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
    seconds = 2 * config.reward.timeout_seconds + 1
    message = (
        f"reward.verifier={name}: an answer to {prompt.prompt_id} was not scored within {seconds:g} s; raise "
        f"reward.timeout_seconds={config.reward.timeout_seconds:g}, or find what the verifier waits for"
    )
    timer = None if late is None else threading.Timer(seconds, late, [message])
    if timer is not None:
        timer.daemon = True
        timer.start()
    try:
        yield
    finally:
        if timer is not None:
            timer.cancel()


def _trial_answers(prompt: Prompt, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield a right answer where the row has one, the same in another spelling, and wrong ones."""
    right = prompt.metadata.get("answer", "1")
    right = right[0] if isinstance(right, list) and right else right
    yield str(right)
    yield f"The answer is \\boxed{{ {right} }}."
    yield "\\boxed{no}"
    yield tokenizer.decode(prompt.token_ids)
    yield ""
    yield "answer"


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
        hints = try_inputs(config, late=lambda message: end(["ConfigError", message], []))
    except (ConfigError, DataError) as problem:
        error = [type(problem).__name__, str(problem)]
    end(error, hints)


if __name__ == "__main__":
    main()
