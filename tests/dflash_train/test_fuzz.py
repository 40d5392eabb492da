"""Made-up data and settings: a right result or one clear sentence, never a traceback from inside.

The number of cases is that of `max_examples`, summed: 3,350. `derandomize` keeps them the same in every run.
"""

from __future__ import annotations

import dataclasses
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_data import CHATML, save_tokenizer
from test_export import saved_run
from tiny import tiny_config

from dflash_train.chat_tokenizers import ByteTokenizer, ChatTokenizer, load_tokenizer
from dflash_train.config import ConfigError, LossConfig, RunConfig
from dflash_train.config_files import dump_config, parse_config
from dflash_train.conversations import ROLES, DataError, Message, parse_sample
from dflash_train.data import Documents
from dflash_train.export import export_run
from dflash_train.import_drafter import import_drafter
from dflash_train.packing import PackedDocuments, plan_rows
from dflash_train.prepare import prepare

T = TypeVar("T")


def cases(count: int) -> settings:
    slow = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]
    return settings(max_examples=count, deadline=None, derandomize=True, suppress_health_check=slow)


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.integers(-2, 20), st.floats(), st.text(max_size=8)
)
VALUES = st.recursive(
    SCALARS, lambda v: st.lists(v, max_size=4) | st.dictionaries(st.text(max_size=6), v, max_size=4), max_leaves=8
)
FIELDS = [
    f"{section.name}.{field.name}"
    for section in dataclasses.fields(RunConfig)
    for field in dataclasses.fields(getattr(RunConfig(), section.name))
]


def attempt(call: Callable[[], T], refusal: type[Exception]) -> tuple[T | None, str | None]:
    """The result, or the text of a refusal, which must be one readable sentence. Any other exception fails the test."""
    try:
        return call(), None
    except refusal as error:
        text = str(error)
    assert text.strip()
    assert "Traceback" not in text
    assert len(text) < 2000
    return None, text


def toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return "''" if value is None or isinstance(value, dict) else repr(value)


@cases(400)
@given(
    st.text(max_size=80) | st.from_regex(r"\[(drafter|loss|data)\]\n[a-z_]{1,8} = [0-9a-z\"\[\].]{0,6}", fullmatch=True)
)
def test_any_text_is_a_config_or_a_clear_error(text: str) -> None:
    config, refusal = attempt(lambda: parse_config(text, "f.toml"), ConfigError)
    assert isinstance(config, RunConfig) if refusal is None else "f.toml" in refusal


@cases(600)
@given(st.lists(st.tuples(st.sampled_from(FIELDS), VALUES), min_size=1, max_size=4))
def test_any_value_of_any_setting_is_taken_or_named(assignments: list[tuple[str, Any]]) -> None:
    overrides = [f"{name}={toml(value)}" for name, value in assignments]
    config, refusal = attempt(lambda: parse_config("", "defaults", overrides), ConfigError)
    if refusal is not None:
        assert any(name.split(".")[0] in refusal for name, _ in assignments)
    elif config is not None:
        assert parse_config(dump_config(config)) == config


@cases(300)
@given(
    st.builds(
        RunConfig,
        loss=st.builds(
            LossConfig,
            ce=st.floats(0.1, 1e300), kl=st.floats(0, 1e-300), decay_gamma=st.floats(1e-3, 1e9),
            weighting=st.sampled_from(["decay", "dpace", "uniform"]), chunk_rows=st.integers(1, 2**40),
        ),
        drafter=st.builds(
            tiny_config,
            rope_theta=st.floats(2, 1e12), embedding_scale=st.floats(allow_nan=False, allow_infinity=False),
            target_layer_ids=st.lists(st.integers(0, 7), max_size=4).map(tuple), sample_from_anchor=st.booleans(),
        ),
    )
)  # fmt: skip
def test_every_config_reads_back_from_its_dump(config: RunConfig) -> None:
    assert parse_config(dump_config(config)) == config


@cases(100)
@given(st.text())
def test_every_path_reads_back_from_its_dump(path: str) -> None:
    if not re.search("[\ud800-\udfff]", path):
        config = RunConfig(target=dataclasses.replace(RunConfig().target, path=path))
        assert parse_config(dump_config(config)) == config


MESSAGE = st.dictionaries(
    st.sampled_from(["role", "content", "from", "value", "x"]),
    st.sampled_from([*ROLES, "human", "gpt", "robot"]) | VALUES,
    max_size=4,
)
RECORDS = st.dictionaries(
    st.sampled_from(["messages", "conversations", "turns", "text", "other"]),
    st.lists(MESSAGE, max_size=3) | VALUES,
    max_size=3,
)


@cases(300)
@given(st.binary(max_size=60))
def test_any_bytes_are_a_sample_or_a_clear_error(line: bytes) -> None:
    check_line(line)


@cases(600)
@given(RECORDS | VALUES)
def test_any_json_is_a_sample_or_a_clear_error(record: Any) -> None:
    check_line(json.dumps(record).encode())


def check_line(line: bytes) -> None:
    sample, refusal = attempt(lambda: parse_sample(line, "f.jsonl:7"), DataError)
    if sample is None:
        assert refusal is not None
        assert refusal.startswith("f.jsonl:7: ")
        return
    assert (sample.text is None) == bool(sample.messages)
    assert all(message.role in ROLES for message in sample.messages)
    assert all(message.content.strip() or message.role == "assistant" for message in sample.messages)
    tokenizer = ByteTokenizer()
    is_text = sample.text is not None
    encoded = tokenizer.encode_text(sample.text) if is_text else tokenizer.encode_conversation(sample.messages)
    assert encoded.tokens.shape == encoded.supervised.shape
    answered = sample.text is not None or any(message.role == "assistant" for message in sample.messages)
    assert encoded.supervised.any() == answered


TURNS = st.lists(
    st.tuples(st.text(min_size=1, max_size=12), st.text(min_size=1, max_size=12)).filter(
        lambda pair: all(t.strip() and not re.search("[\ud800-\udfff]|<\\|", t) for t in pair)
    ),
    min_size=1,
    max_size=3,
)


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return load_tokenizer(str(save_tokenizer(tmp_path_factory.mktemp("chatml"), CHATML)))


@cases(300)
@given(TURNS)
def test_exactly_the_assistants_words_and_end_tokens_are_supervised(
    chatml: ChatTokenizer, turns: list[tuple[str, str]]
) -> None:
    """Whatever is said, also when both say the same or one repeats the other."""
    messages = [Message(role, text) for pair in turns for role, text in zip(("user", "assistant"), pair, strict=True)]
    encoded = chatml.encode_conversation(messages)
    inner = chatml._tokenizer  # type: ignore[attr-defined]
    runs = np.split(encoded.tokens, np.flatnonzero(np.diff(encoded.supervised.astype(int))) + 1)[1::2]
    assert [inner.decode(run.tolist()) for run in runs] == [answer + "<|im_end|>" for _, answer in turns]


@cases(200)
@given(st.lists(st.integers(0, 50), max_size=60), st.integers(2, 40))
def test_any_lengths_are_packed_each_once(lengths: list[int], row_length: int) -> None:
    rows = plan_rows(lengths, row_length)
    assert sorted(i for row in rows for i in row) == [i for i, length in enumerate(lengths) if length]
    assert all(0 < sum(min(lengths[i], row_length) for i in row) <= row_length for row in rows)


@cases(150)
@given(st.lists(RECORDS.map(lambda r: json.dumps(r).encode()) | st.binary(max_size=20), min_size=1, max_size=8))
def test_any_file_is_prepared_or_refused_as_a_whole(lines: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path, output = Path(folder) / "in.jsonl", Path(folder) / "out"
        good = json.dumps(
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
        ).encode()
        path.write_bytes(b"\n".join([*lines, good]) + b"\n")
        manifest = prepare([path], ByteTokenizer(), output, skip_bad=True)
        documents = Documents(output, tokenizer=ByteTokenizer.fingerprint)
        given_lines = sum(1 for line in path.read_bytes().split(b"\n") if line.strip())
        assert len(documents) + sum(manifest.dropped.values()) == given_lines
        packed = PackedDocuments(documents, 16)
        batch = packed.batch(range(len(packed)))
        assert int((batch.documents >= 0).sum()) == np.minimum(documents.lengths, 16).sum()
        if manifest.dropped.get("bad"):
            with pytest.raises(DataError, match=re.escape(str(path))):
                prepare([path], ByteTokenizer(), output, overwrite=True)
            assert Documents(output).manifest == manifest


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    saved_run(folder / "run")
    export_run(folder / "run", folder / "out", format="z-lab", dtype="float32")
    return folder / "out"


@cases(400)
@given(st.data())
def test_any_change_to_an_exported_config_is_read_or_refused(exported: Path, data: st.DataObject) -> None:
    path = exported / "config.json"
    original = path.read_text()
    record = json.loads(original)
    place = data.draw(st.sampled_from([record, record["dflash_config"], record["rope_parameters"]]))
    key = data.draw(st.sampled_from(sorted(place)))
    if data.draw(st.booleans()):
        del place[key]
    else:
        place[key] = data.draw(VALUES | st.lists(st.sampled_from(["full_attention", "sliding_attention"]), max_size=3))
    path.write_text(json.dumps(record))
    try:
        read, refusal = attempt(lambda: import_drafter(exported), ConfigError)
    finally:
        path.write_text(original)
    if read is None:
        assert refusal is not None
        assert str(exported) in refusal
    else:
        config, weights = read
        assert weights["fc.weight"].shape == (config.hidden_size, len(config.taps) * config.hidden_size)
