"""Tokens of a conversation and which of them the target wrote: the assistant's, with the token that ends its turn."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from dflash_train.conversations import DataError, Message
from dflash_train.model_files import model_place

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")

PLAIN_TEMPLATE = (
    "{{ bos_token or '' }}{% for message in messages %}{{ message.role | capitalize }}: {{ message.content }}"
    "{{ (eos_token or '') if message.role == 'assistant' else '' }}\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""A template for base models that come without one (`--template plain`)."""


class Encoded(NamedTuple):
    """A document."""

    tokens: np.ndarray
    """[length] int32."""
    supervised: np.ndarray
    """[length] bool, tokens to be predicted."""


class ChatTokenizer(Protocol):
    """What preparing data needs of a tokenizer."""

    fingerprint: str
    """Hash of everything that decides the tokens: equal for data that may be trained on together."""
    vocab_size: int
    pad_id: int
    stop_ids: tuple[int, ...]
    """Tokens that end an answer."""
    suppressed_ids: tuple[int, ...]
    """Tokens that an answer never contains."""

    def encode_conversation(self, messages: Sequence[Message]) -> Encoded:
        """A whole conversation. Raises DataError if the chat template refuses it."""

    def encode_text(self, text: str) -> Encoded:
        """Plain text, all supervised."""

    def encode_prompt(self, messages: Sequence[Message]) -> list[int]:
        """The conversation so far, up to where the assistant starts. Raises DataError as above."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of an answer, without its end token."""


class ByteTokenizer:
    """UTF-8 bytes and eight special tokens, for the `tiny` target. A turn is its role's token, the bytes, and `END`.

    Bytes that are not UTF-8, which a random target does write, are shown as the private-use characters U+F780 … U+F7FF
    and read back as the same bytes.
    """

    SYSTEM, USER, ASSISTANT, TOOL, END, BEGIN, MASK, PAD = range(256, 264)

    vocab_size = 264
    pad_id = PAD
    stop_ids: tuple[int, ...] = (END,)
    suppressed_ids: tuple[int, ...] = (SYSTEM, USER, ASSISTANT, TOOL, BEGIN, MASK, PAD)
    fingerprint = hashlib.sha256(b"dflash_train bytes 1").hexdigest()

    _role_ids = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": TOOL}  # noqa: RUF012 - never written

    def encode_conversation(self, messages: Sequence[Message]) -> Encoded:
        tokens: list[int] = []
        supervised: list[bool] = []
        for message in messages:
            turn = [*self._bytes(message.content), self.END]
            tokens += [self._role_ids[message.role], *turn]
            supervised += [False, *[message.role == "assistant"] * len(turn)]
        return Encoded(np.array(tokens, np.int32), np.array(supervised, np.bool_))

    def encode_text(self, text: str) -> Encoded:
        tokens = np.array([self.BEGIN, *self._bytes(text), self.END], np.int32)
        return Encoded(tokens, np.arange(len(tokens)) > 0)

    def encode_prompt(self, messages: Sequence[Message]) -> list[int]:
        return [*self.encode_conversation(messages).tokens.tolist(), self.ASSISTANT]

    def decode(self, ids: Sequence[int]) -> str:
        text = bytes(i for i in ids if i < 256).decode("utf-8", "surrogateescape")
        return re.sub("[\udc80-\udcff]", lambda half: chr(ord(half[0]) - 0xDC00 + 0xF700), text)

    @staticmethod
    def _bytes(text: str) -> bytes:
        return re.sub("[\uf780-\uf7ff]", lambda c: chr(ord(c[0]) - 0xF700 + 0xDC00), text).encode(
            "utf-8", "surrogateescape"
        )


class TemplateTokenizer:
    """A fast tokenizer of `transformers` and its chat template.

    Templates with `{% generation %}` say themselves what the assistant wrote. For the others the prompt before each
    assistant turn is rendered and looked for at the head of the whole: what follows it, up to the end of the message's
    text and the special token there, was written by the assistant. A turn that the template rewrites (Qwen3 drops the
    thoughts of earlier turns) is not found there and stays unsupervised: the target never wrote it in that form.
    """

    def __init__(self, tokenizer: Any, template_args: Mapping[str, Any] | None = None) -> None:
        if not tokenizer.is_fast:
            raise DataError(
                f"{type(tokenizer).__name__} is a slow tokenizer without offsets; a tokenizer.json is needed"
            )
        if not isinstance(tokenizer.chat_template, str):
            raise DataError(
                "the tokenizer has no chat template; pass --template FILE, or --template plain for a base model"
            )
        self._tokenizer = tokenizer
        self._args = dict(template_args or {})
        added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special = added | set(tokenizer.all_special_ids)
        state = [tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template, json.dumps(self._args, sort_keys=True)]
        self.fingerprint = hashlib.sha256("\0".join(state).encode("utf-8", "surrogatepass")).hexdigest()
        self.vocab_size = len(tokenizer)
        self.stop_ids = self._find_stop_ids()
        self.pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else self.stop_ids[0]
        self.suppressed_ids: tuple[int, ...] = ()

    def encode_conversation(self, messages: Sequence[Message]) -> Encoded:
        if re.search(r"{%-?\s*generation\s*-?%}", self._tokenizer.chat_template):
            encoded = self._apply(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
            supervised = np.array(encoded["assistant_masks"], np.bool_)
            if supervised.any():
                return Encoded(np.array(encoded["input_ids"], np.int32), supervised)
        whole: str = self._apply(messages, tokenize=False)
        encoded = self._tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
        tokens = np.array(encoded["input_ids"], np.int32)
        starts, ends = np.array(encoded["offset_mapping"], np.int64).reshape(-1, 2).T
        supervised = np.zeros(len(tokens), np.bool_)
        for start, end, turn_end in self._assistant_spans(messages, whole):
            supervised |= (starts >= start) & (starts < end) & (ends > starts)
            for i in np.flatnonzero((starts >= end) & (starts < turn_end)):
                if int(tokens[i]) in self._special:
                    supervised |= (starts >= end) & (starts <= starts[i])
                if int(tokens[i]) in self._special or whole[starts[i] : ends[i]].strip():
                    break
        return Encoded(tokens, supervised)

    def encode_text(self, text: str) -> Encoded:
        tokens = np.array(self._tokenizer(text)["input_ids"], np.int32)
        return Encoded(tokens, ~np.isin(tokens, [i for i in [self._tokenizer.bos_token_id] if i is not None]))

    def encode_prompt(self, messages: Sequence[Message]) -> list[int]:
        text: str = self._apply(messages, tokenize=False, add_generation_prompt=True)
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def _apply(self, messages: Sequence[Message], **how: Any) -> Any:
        from jinja2 import TemplateError

        try:
            turns = [{"role": m.role, "content": m.content} for m in messages]
            return self._tokenizer.apply_chat_template(turns, **self._args, **how)
        except (TemplateError, TypeError, ValueError) as error:  # templates are programs, with errors of their own
            raise DataError(f"the chat template refuses the conversation: {error}") from error

    def _assistant_spans(self, messages: Sequence[Message], whole: str) -> list[tuple[int, int, int]]:
        """Character ranges of `whole` that the assistant wrote, without end-of-turn tokens, and where its turn ends."""
        spans: list[tuple[int, int, int]] = []
        for i, message in enumerate(messages):
            if message.role != "assistant" or i == 0:
                continue
            before: str = self._apply(messages[:i], tokenize=False)
            prompt: str = self._apply(messages[:i], tokenize=False, add_generation_prompt=True)
            if not whole.startswith(prompt):
                continue
            content = message.content.strip()
            found = whole.find(content, len(prompt))
            after = whole.find(messages[i + 1].content.strip(), len(prompt)) if i + 1 < len(messages) else len(whole)
            if found < 0 or (0 <= after < found):
                continue
            # A template without a generation prompt leaves the assistant's header to us: only the text counts then.
            start = len(prompt) if len(prompt) > len(before) else found
            end = found + len(content)
            turn: str = self._apply(messages[: i + 1], tokenize=False)
            spans.append((start, end, len(turn) if whole.startswith(turn) else end + 1))
        return spans

    def _find_stop_ids(self) -> tuple[int, ...]:
        """The end-of-text token, and the special token that follows an answer in this template."""
        stops = [] if self._tokenizer.eos_token_id is None else [int(self._tokenizer.eos_token_id)]
        conversation = [Message("user", "a"), Message("assistant", "b")]
        encoded = self.encode_conversation(conversation)
        last = encoded.tokens[encoded.supervised][-1:].tolist()
        stops += [i for i in last if i in self._special and i not in stops]
        if not stops:
            raise DataError("the tokenizer has neither an end-of-text token nor one that ends a turn")
        return tuple(stops)


def load_tokenizer(
    source: str, template: str | None = None, template_args: Mapping[str, Any] | None = None
) -> ChatTokenizer:
    """A tokenizer from a local folder or .gguf file, or the byte-level one for `bytes`.

    Args:
        source: folder, .gguf file, or `bytes`.
        template: a Jinja file to use instead of the tokenizer's chat template, or `plain` for `PLAIN_TEMPLATE`.
        template_args: passed to the template, such as {"enable_thinking": False}.

    Raises:
        DataError: it cannot be loaded or has no template.
        TargetError: `source` is no folder with a model and no .gguf file.
    """
    if source == "bytes":
        return ByteTokenizer()
    from transformers import AutoTokenizer

    path = Path(source)
    if any((path / name).is_file() for name in _TOKENIZER_FILES):
        place = {"pretrained_model_name_or_path": source}
    else:
        place = model_place(path)
        if "gguf_file" not in place:  # `transformers` would make one without any token from the model's config
            raise DataError(f"{source} has no tokenizer: none of {', '.join(_TOKENIZER_FILES)}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(**place, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, ImportError, KeyError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(f"the tokenizer of {source} could not be loaded: {reason}") from error
    if template == "plain":
        tokenizer.chat_template = PLAIN_TEMPLATE
    elif template is not None:
        try:
            tokenizer.chat_template = Path(template).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"the chat template {template} cannot be read: {error}") from error
    return TemplateTokenizer(tokenizer, template_args)
