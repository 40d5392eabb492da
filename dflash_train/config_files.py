"""Settings from TOML presets, files and `--set a.b=value`, and back to TOML."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import sys
import typing
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from dflash_train.config import ConfigError, RunConfig, field_names

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

C = TypeVar("C")


def presets() -> list[str]:
    """Names of the presets that come with the package."""
    folder = resources.files("dflash_train") / "presets"
    return sorted(entry.name[: -len(".toml")] for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_config(source: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a preset by name or a TOML file, then apply `section.field=value` overrides in order.

    Raises:
        ConfigError: no such preset or file, bad TOML, an unknown key (the nearest name is given), a value of the wrong
            type or out of range.
    """
    name = str(source)
    if name in presets():
        where, text = (
            f"preset {name}",
            (resources.files("dflash_train") / "presets" / f"{name}.toml").read_text("utf-8"),
        )
    else:
        try:
            where, text = name, Path(name).read_text("utf-8")
        except OSError as error:
            raise ConfigError(
                f"{name} is neither a preset ({', '.join(presets())}) nor a readable file: {error}"
            ) from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{name} is not UTF-8 text: {error}; save it as UTF-8, or name another file") from error
    return parse_config(text, where, overrides)


def parse_config(text: str, where: str = "config", overrides: Sequence[str] = ()) -> RunConfig:
    """As `load_config`, from TOML text; `where` names it in messages."""
    try:
        tree = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        hint = "`dflash-train config tiny-cpu` prints a whole file to go by"
        raise ConfigError(f"{where} is not TOML: {error}; {hint}") from error
    places = _Places(where, text)
    for override in overrides:
        _apply_override(tree, override, places)
    return _build(RunConfig, tree, (), places)


def dump_config(config: RunConfig) -> str:
    """The settings as TOML that `parse_config` reads back to an equal config."""
    lines: list[str] = []
    for section in field_names(RunConfig):
        lines.append(f"[{section}]")
        values = getattr(config, section)
        lines += [f"{name} = {_toml(getattr(values, name))}" for name in field_names(type(values))]
        lines.append("")
    return "\n".join(lines)


class _Places:
    """Where each key was set: a line of the text, or an override."""

    def __init__(self, where: str, text: str) -> None:
        self._where = where
        self._lines: dict[tuple[str, ...], int] = {}
        self.overridden: dict[tuple[str, ...], str] = {}
        section: tuple[str, ...] = ()
        for number, line in enumerate(text.splitlines(), 1):
            if header := re.match(r"\s*\[([^\[\]]+)\]", line):
                section = tuple(part.strip().strip("\"'") for part in header[1].split("."))
                self._lines.setdefault(section, number)
            elif assignment := re.match(r"\s*([\w\"'.-]+)\s*=", line):
                key = tuple(part.strip("\"'") for part in assignment[1].split("."))
                self._lines.setdefault((*section, *key), number)

    def of(self, key: tuple[str, ...]) -> str:
        if key in self.overridden:
            return f"--set {self.overridden[key]}"
        return f"{self._where}:{self._lines[key]}" if key in self._lines else self._where


def _apply_override(tree: dict[str, Any], override: str, places: _Places) -> None:
    dotted, equals, value = override.partition("=")
    keys = tuple(part.strip() for part in dotted.split("."))
    if not equals or len(keys) != 2 or not all(keys):
        raise ConfigError(f"--set takes section.field=value, got {override!r}; try --set drafter.block_size=8")
    places.overridden[keys] = override
    section = tree.setdefault(keys[0], {})
    if not isinstance(section, dict):
        raise ConfigError(f"{places.of(keys[:1])}: {keys[0]} must be a section, got {section!r}")
    try:
        section[keys[1]] = tomllib.loads(f"value = {value}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        section[keys[1]] = value.strip()  # a bare word: `--set target.path=models/x` needs no quotes


def _build(cls: type[C], tree: dict[str, Any], prefix: tuple[str, ...], places: _Places) -> C:
    known = field_names(cls)
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for key, value in tree.items():
        path = (*prefix, key)
        name = ".".join(path)
        if key not in known:
            raise ConfigError(f"{places.of(path)}: unknown key {name}{_did_you_mean(key, known)}")
        if dataclasses.is_dataclass(hints[key]):
            if not isinstance(value, dict):
                raise ConfigError(f"{places.of(path)}: {name} must be a section [{name}], got {value!r}")
            values[key] = _build(typing.cast("type[Any]", hints[key]), value, path, places)
        else:
            default = next(f.default for f in dataclasses.fields(cls) if f.name == key)  # type: ignore[arg-type]
            example = f"such as {name} = {_toml(default)}"
            values[key] = _convert(value, hints[key], name, places.of(path), example)
    try:
        return cls(**values)
    except ConfigError as error:
        named = next((key for key in tree if f"{'.'.join((*prefix, key))} " in f"{error} "), None)
        where = places.of((*prefix, named)) if named else places.of(prefix)
        raise ConfigError(f"{where}: {error}") from None


def _did_you_mean(key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else f"; there are {', '.join(known)}"


def _convert(value: Any, hint: Any, name: str, where: str, example: str) -> Any:
    """`value` as TOML gave it, checked against a field's annotation; ints become floats, lists become tuples."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        if value in arguments and isinstance(value, str):
            return value
        raise ConfigError(f"{where}: {name} must be one of {', '.join(map(str, arguments))}, got {value!r}")
    if origin is tuple:
        if not isinstance(value, list):
            raise ConfigError(f"{where}: {name} must be a list, got {value!r}; {example}")
        return tuple(_convert(item, arguments[0], f"{name}[{i}]", where, example) for i, item in enumerate(value))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise ConfigError(
                f"{where}: {name} is too large for a float: an integer of {value.bit_length()} bits"
            ) from None
    if isinstance(value, hint) and not (isinstance(value, bool) and hint is not bool):
        if hint is int and abs(value) >= 2**63:
            raise ConfigError(f"{where}: {name} must fit in 64 bits, got an integer of {value.bit_length()} bits")
        return value
    kind = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[hint]
    raise ConfigError(f"{where}: {name} must be {kind}, got {value!r}; {example}")


def _toml(value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case tuple():
            return "[" + ", ".join(map(_toml, value)) + "]"
        case _:
            return repr(value)


__all__ = ["dump_config", "load_config", "parse_config", "presets"]
