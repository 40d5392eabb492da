"""Conversations from JSON lines in the shapes that public data sets have.

A line is one object with one of: `messages` ([{"role", "content"}]), `conversations` (ShareGPT: [{"from", "value"}]),
`turns` (user turns as strings; what is to be answered) or `text` (plain text, all of it to be learnt).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROLES = ("system", "user", "assistant", "tool")
_SHAREGPT_ROLES = {
    "system": "system", "human": "user", "user": "user",
    "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant", "model": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool",
}  # fmt: skip


class DataError(ValueError):
    """Bad data; the message has file, line, reason and next step."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn."""

    role: str
    """One of `ROLES`."""
    content: str


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of the input: a conversation, or plain text."""

    place: str
    """file:line."""
    messages: tuple[Message, ...] = ()
    text: str | None = None


def read_samples(path: Path) -> Iterator[Sample | DataError]:
    """Every line of a JSONL file that is not blank, in order; a bad line comes as the error that tells why, not raised.

    Raises:
        DataError: the file cannot be opened or read.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                place = f"{path}:{number}"
                try:
                    yield parse_sample(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line, place)
                except DataError as error:
                    yield error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; name a JSONL file, one sample in each line") from error


def parse_sample(line: bytes, place: str) -> Sample:
    """One line of JSON as a sample.

    Raises:
        DataError: it is not UTF-8, not JSON, or none of the four shapes; `place` is named.
    """
    try:
        record = json.loads(line.rstrip(b"\r\n").decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: invalid UTF-8 at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{place}: not JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits; brackets nested too deep
        raise DataError(f"{place}: JSON that cannot be read: {type(error).__name__}") from error
    if not isinstance(record, dict):
        raise DataError(f"{place}: must be a JSON object, got {_kind(record)}")
    if "messages" in record:
        return Sample(place, _messages(record["messages"], "messages", "role", "content", {r: r for r in ROLES}, place))
    if "conversations" in record:
        return Sample(
            place, _messages(record["conversations"], "conversations", "from", "value", _SHAREGPT_ROLES, place)
        )
    if "turns" in record:
        turns = _list(record["turns"], "turns", place)
        return Sample(place, tuple(Message("user", _text(t, f"turns[{i}]", place)) for i, t in enumerate(turns)))
    if "text" in record:
        return Sample(place, text=_text(record["text"], "text", place))
    raise DataError(f"{place}: has none of messages, conversations, turns, text; its keys are {sorted(record)[:8]}")


def _messages(
    value: object, field: str, role_key: str, content_key: str, roles: dict[str, str], place: str
) -> tuple[Message, ...]:
    messages = []
    for i, item in enumerate(_list(value, field, place)):
        where = f"{field}[{i}]"
        if not isinstance(item, dict):
            raise DataError(f"{place}: {where} must be an object, got {_kind(item)}")
        role = item.get(role_key)
        if not isinstance(role, str) or role not in roles:
            raise DataError(f"{place}: {where}.{role_key} must be one of {', '.join(roles)}, got {_shown(role)}")
        content = item.get(content_key)
        # A model may answer nothing; the turn is kept, since what follows was said after it.
        empty = roles[role] == "assistant" and content == ""
        messages.append(Message(roles[role], "" if empty else _text(content, f"{where}.{content_key}", place)))
    return tuple(messages)


def _list(value: object, field: str, place: str) -> list[Any]:
    if not isinstance(value, list):
        raise DataError(f"{place}: {field} must be a list, got {_kind(value)}")
    if not value:
        raise DataError(f"{place}: {field} is empty")
    return value


def _text(value: object, field: str, place: str) -> str:
    if isinstance(value, list) and value and all(isinstance(p, dict) and p.get("type") == "text" for p in value):
        value = "".join(_text(part.get("text"), f"{field}[{i}].text", place) for i, part in enumerate(value))
    if not isinstance(value, str):
        raise DataError(f"{place}: {field} must be text, got {_kind(value)}")
    if not value.strip():
        raise DataError(f"{place}: {field} is empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{place}: {field} has half a surrogate pair at character {error.start}") from error
    return value


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "nothing"}
    return names.get(type(value), "a number")


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 40 else f"{shown[:40]}…"
