"""Tokenizer and chat template of a Hugging Face folder, without transformers."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers.decoders import DecodeStream

from rollmesh.characters import half_character
from rollmesh.chat_template import SPECIAL_TOKEN_NAMES, ChatTemplate, Message, Tools
from rollmesh.errors import DataError
from rollmesh.template_language import Span
from rollmesh.types import Int32Array

_SHORT_CHARACTERS = 8192
"""Length of a text that is encoded in less time than a thread needs to begin."""


class Tokenizer:
    """Tokenizer and chat template of one model folder.

    By default ``encode`` adds no special tokens, so environment text can be inserted into a response, and ``decode``
    omits them, so verifiers get plain text.
    """

    def __init__(self, folder: str | Path) -> None:
        """Read ``tokenizer.json`` and the config files beside it, if present.

        Raises DataError if the folder has no readable fast tokenizer.
        """
        self._folder = Path(folder)
        path = self._folder / "tokenizer.json"
        try:
            content = path.read_bytes()
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except OSError as error:
            raise DataError(
                f"{path}: {error.strerror}; the model folder needs a fast tokenizer (tokenizer.json)"
            ) from error
        except Exception as error:  # the Rust side raises plain Exception for a file it cannot parse
            raise DataError(f"{path}: not a tokenizer: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        settings = _read_json(self._folder / "tokenizer_config.json")
        model_config = _read_json(self._folder / "config.json")
        self._special_tokens = {
            name: text for name in SPECIAL_TOKEN_NAMES if (text := _token_text(settings.get(name))) is not None
        }
        known = self._tokenizer.get_vocab(with_added_tokens=True)
        token_count = max(known.values(), default=-1) + 1
        self.vocab_size = int(_text_config(model_config).get("vocab_size") or token_count)
        """Number of token ids of the model; ids in [0, vocab_size) are valid.

        The embedding size of ``config.json`` has priority: models pad the embedding, and a padding id can be sampled.
        """
        named = self._find_eos_token_ids(model_config)
        self.eos_token_ids = tuple(i for i in named if 0 <= i < self.vocab_size)
        """Ids that end a turn, ascending: from generation_config.json (else config.json) and the tokenizer."""
        self.ignored_eos_token_ids = tuple(i for i in named if i not in self.eos_token_ids)
        """Ids that the model folder names as ends of a turn, but that have no embedding: none can be sampled."""
        template = _read_chat_template(self._folder, settings)
        self.has_chat_template = bool(template)
        self._chat_template = ChatTemplate(template, self._folder, self._special_tokens)
        printed = json.dumps([template, self._special_tokens], sort_keys=True).encode()
        digests = [hashlib.sha256(part).hexdigest()[:16] for part in (content, printed)]
        ends = " ".join(map(str, self.eos_token_ids)) or "none"
        self.content = "tokenizer {}, chat template {}, end tokens {}".format(*digests, ends)
        """Digests of tokenizer.json and of the chat template with its special tokens, and the end tokens.

        With an equal content, texts have equal tokens and answers equal ends.
        """

    @property
    def folder(self) -> Path:
        """Model folder that the tokenizer was read from."""
        return self._folder

    @cached_property
    def vocabulary_digest(self) -> str:
        """sha256 (hex) of the ids with their tokens; of equal vocabularies also under other rules of splitting."""
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        listed = sorted((token_id, token) for token, token_id in vocabulary.items())
        return hashlib.sha256(json.dumps(listed).encode()).hexdigest()

    def token_id(self, text: str) -> int | None:
        """Return the id of a token of the vocabulary, or None."""
        return self._tokenizer.token_to_id(text)

    @property
    def unknown_token_id(self) -> int | None:
        """Id of words outside of the vocabulary; None for a tokenizer that splits every word into known parts."""
        name = self._special_tokens.get("unk_token")
        return None if name is None else self._tokenizer.token_to_id(name)

    @property
    def end_token_id(self) -> int | None:
        """Id of the tokenizer's eos_token; None if it names none."""
        name = self._special_tokens.get("eos_token")
        return None if name is None else self._tokenizer.token_to_id(name)

    def encode(self, text: str, *, special_tokens: bool = False) -> Int32Array:
        """Encode text to int32 [tokens].

        ``special_tokens`` adds the tokens that the tokenizer puts before a sequence (for example a begin token, unless
        the text begins with it), and never those after it: an end token would end the context. Use it for the start of
        a context, never for its middle. Raises DataError for an id without an embedding, and for a text with half of a
        surrogate pair.
        """
        return self._ids(self._tokenizer.encode(_whole(text), add_special_tokens=special_tokens))

    def encode_aside(self, text: str, *, special_tokens: bool = False) -> Int32Array:
        """Do the same as ``encode`` for a text that may be long, in a worker thread that then blocks no other."""
        if len(text) < _SHORT_CHARACTERS:
            return self.encode(text, special_tokens=special_tokens)
        # Only the tokenizer's batch calls release the interpreter's lock.
        (encoding,) = self._tokenizer.encode_batch([_whole(text)], add_special_tokens=special_tokens)
        return self._ids(encoding)

    def _ids(self, encoding: tokenizers.Encoding) -> Int32Array:
        ids, mask = np.array(encoding.ids, np.int32), encoding.special_tokens_mask
        added = sum(1 for _ in takewhile(bool, mask))
        ids = ids[: len(ids) - sum(1 for _ in takewhile(bool, reversed(mask[added:])))]
        if added and np.array_equal(ids[:added], ids[added : 2 * added]):
            ids = ids[added:]
        self.check_range(ids)
        return ids

    def decode(self, ids: npt.ArrayLike, *, special_tokens: bool = False) -> str:
        """Decode token ids [tokens] to text; ids in the padding of the vocabulary decode to nothing.

        Raises DataError for an id outside [0, vocab_size).
        """
        listed = ids if isinstance(ids, list) else np.asarray(ids, np.int64).tolist()
        if listed and not 0 <= min(listed) <= max(listed) < self.vocab_size:
            self.check_range(np.array(listed, np.int64))
        return str(self._tokenizer.decode(listed, skip_special_tokens=not special_tokens))

    def without_special_tokens(self, text: str) -> str:
        """Return a text that was decoded with special tokens without them."""
        for token in self.special_tokens.values():
            text = text.replace(token, "")
        return text

    @cached_property
    def special_tokens(self) -> Mapping[int, str]:
        """Texts of the tokens that ``decode`` leaves out, by id."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {token_id: token.content for token_id, token in added.items() if token.special}

    def pieces(self, ids: npt.ArrayLike) -> list[str]:
        """Return the text that each token [tokens] adds, special tokens included; joined, the text of the sequence.

        A token that does not complete a character adds nothing; the token that completes it adds all of it. Raises
        DataError for an id outside [0, vocab_size).
        """
        array = np.asarray(ids, np.int64)
        self.check_range(array)
        stream = DecodeStream(skip_special_tokens=False)
        pieces: list[str] = []
        for token_id in array.tolist():
            try:
                pieces.append(stream.step(self._tokenizer, token_id) or "")
            except Exception:  # the Rust side raises plain Exception where a sequence does not extend its own text
                stream = DecodeStream(skip_special_tokens=False)
                pieces.append(str(self._tokenizer.decode([token_id], skip_special_tokens=False)))
        return pieces

    def render_chat(self, messages: Sequence[Message], *, variables: Mapping[str, Any] | None = None) -> Int32Array:
        """Render chat messages with the model's template to int32 [tokens]; raises DataError like ``chat_text``."""
        return self.encode(self.chat_text(messages, variables=variables))

    def chat_text(
        self, messages: Sequence[Message], *, variables: Mapping[str, Any] | None = None, tools: Tools = None
    ) -> str:
        """Render chat messages with the model's template and further variables of it to text (``ChatTemplate.text``).

        Raises DataError if the model has no template, or if the template refuses or loses a message.
        """
        return self._chat_template.text(messages, variables or {}, tools)

    @property
    def marks_answers(self) -> bool:
        """True if the chat template marks the text of answers."""
        return self._chat_template.marks_answers

    def conversation_text(
        self, messages: Sequence[Message], *, variables: Mapping[str, Any] | None = None, tools: Tools = None
    ) -> str:
        """Render a whole conversation to text, without the beginning of an answer; raises DataError like the others."""
        return self._chat_template.conversation(messages, variables or {}, tools)

    def answer_spans(
        self, messages: Sequence[Message], *, variables: Mapping[str, Any] | None = None, tools: Tools = None
    ) -> list[Span]:
        """Return where the answers are in the text of a whole conversation (``ChatTemplate.answers``)."""
        ends = [self.decode([i], special_tokens=True) for i in self.eos_token_ids]
        return self._chat_template.answers(messages, variables or {}, tools, ends)

    def check_template_variables(self, names: Iterable[str], field: str) -> None:
        """Raise DataError for a variable that the chat template does not read, or that is not the caller's to set."""
        self._chat_template.check_variables(names, field)

    def _find_eos_token_ids(self, model_config: Mapping[str, Any]) -> tuple[int, ...]:
        generation = _read_json(self._folder / "generation_config.json")
        found = generation.get("eos_token_id", _text_config(model_config).get("eos_token_id"))
        named = [i for i in (found if isinstance(found, list) else [found]) if i is not None]
        if any(not isinstance(i, int) for i in named):
            raise DataError(f"{self._folder}: eos_token_id={found!r} must be a token id, or a list of them")
        own = self.end_token_id
        return tuple(sorted({*named, *(() if own is None else (own,))}))

    def check_range(self, ids: npt.NDArray[Any]) -> None:
        """Raise DataError for an id outside [0, vocab_size)."""
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.vocab_size:
            at = int(np.flatnonzero((ids < 0) | (ids >= self.vocab_size))[0])
            limits = f"[0, {self.vocab_size})"
            raise DataError(f"token_ids[{at}]: id {int(ids[at])} is outside the vocabulary {limits} of {self._folder}")


def _whole(text: str) -> str:
    if problem := half_character(text):
        raise DataError(problem)
    return text


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path}: not valid JSON: {error}") from error
    return value if isinstance(value, dict) else {}


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read_chat_template(folder: Path, settings: Mapping[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    found = settings.get("chat_template")
    if isinstance(found, list):
        found = next((t["template"] for t in found if isinstance(t, dict) and t.get("name") == "default"), None)
    return found if isinstance(found, str) else ""
