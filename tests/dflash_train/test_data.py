import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from tiny import write_lines

from dflash_train.chat_tokenizers import ByteTokenizer, ChatTokenizer, load_tokenizer
from dflash_train.conversations import DataError, Message, Sample, parse_sample, read_samples
from dflash_train.data import Documents
from dflash_train.packing import PackedDocuments, RowSampler, plan_rows
from dflash_train.prepare import prepare

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"messages": CHAT}, (("user", "hi"), ("assistant", "yes"))),
        (
            {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]},
            (("user", "hi"), ("assistant", "yes")),
        ),
        ({"turns": ["hi", "and?"]}, (("user", "hi"), ("user", "and?"))),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
            (("user", "ab"),),
        ),
    ],
)
def test_the_known_shapes_are_read(record: object, expected: tuple[tuple[str, str], ...]) -> None:
    sample = parse_sample(json.dumps(record).encode(), "f:1")
    assert tuple((m.role, m.content) for m in sample.messages) == expected


def test_plain_text_is_read() -> None:
    assert parse_sample(b'{"text": "abc"}', "f:1") == Sample("f:1", text="abc")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"messages": ', "not JSON: Expecting value at column 14"),
        (b"\xff\xfe", "invalid UTF-8 at byte 0"),
        (b"[" * 100_000, "JSON that cannot be read: RecursionError"),
        (b"1" * 5000, "JSON that cannot be read: ValueError"),
        (b"[]", "must be a JSON object, got a list"),
        (b'{"prompt": "x"}', "has none of messages, conversations, turns, text; its keys are ['prompt']"),
        (b'{"messages": []}', "messages is empty"),
        (b'{"messages": {}}', "messages must be a list, got an object"),
        (b'{"messages": ["x"]}', "messages[0] must be an object, got text"),
        (
            b'{"messages": [{"role": "robot", "content": "x"}]}',
            "messages[0].role must be one of system, user, assistant",
        ),
        (b'{"messages": [{"role": ["user"], "content": "x"}]}', "messages[0].role must be one of"),
        (b'{"messages": [{"role": "user", "content": 3}]}', "messages[0].content must be text, got a number"),
        (b'{"messages": [{"role": "user"}]}', "messages[0].content must be text, got nothing"),
        (b'{"messages": [{"role": "user", "content": " "}]}', "messages[0].content is empty"),
        (b'{"conversations": [{"from": "alien", "value": "x"}]}', "conversations[0].from must be one of system, human"),
        (b'{"turns": [null]}', "turns[0] must be text, got nothing"),
        (b'{"text": "\\ud800"}', "text has half a surrogate pair at character 0"),
    ],
)
def test_a_bad_line_names_file_line_and_reason(line: bytes, reason: str, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "d.jsonl", {"text": "fine"}, b"\n", line + b"\n", {"text": "fine too"})
    first, error, last = read_samples(path)
    assert isinstance(first, Sample)
    assert isinstance(last, Sample)
    assert str(error).startswith(f"{path}:3: {reason}")
    assert last.place == f"{path}:4"


def test_a_byte_order_mark_is_no_error(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "d.jsonl", b"\xef\xbb\xbf", {"text": "fine"})
    assert [s.text for s in read_samples(path) if isinstance(s, Sample)] == ["fine"]


def test_bytes_supervise_the_assistant_and_the_end_of_its_turn() -> None:
    t = ByteTokenizer()
    encoded = t.encode_conversation([Message("user", "hi"), Message("assistant", "é")])
    assert encoded.tokens.tolist() == [t.USER, 104, 105, t.END, t.ASSISTANT, 0xC3, 0xA9, t.END]
    assert encoded.supervised.tolist() == [False] * 5 + [True] * 3
    assert t.encode_prompt([Message("user", "hi")]) == [t.USER, 104, 105, t.END, t.ASSISTANT]


def test_any_bytes_survive_being_text() -> None:
    t = ByteTokenizer()
    ids = [*range(256), 0xE2, 0x82, 0xAC]
    text = t.decode(ids)
    text.encode("utf-8")
    assert t.encode_conversation([Message("assistant", text)]).tokens.tolist() == [t.ASSISTANT, *ids, t.END]
    assert text.endswith("€")


def test_prepared_documents_come_back_as_they_were(tmp_path: Path) -> None:
    samples = [{"messages": CHAT}, {"text": "plain"}, {"messages": CHAT * 3}]
    path = write_lines(tmp_path / "in.jsonl", *samples)
    manifest = prepare([path, path], ByteTokenizer(), tmp_path / "out")
    documents = Documents(tmp_path / "out", tokenizer=ByteTokenizer.fingerprint)
    assert (len(documents), manifest.documents, manifest.sources) == (6, 6, ["in.jsonl"] * 2)
    expected = ByteTokenizer().encode_text("plain")
    for number in (1, 4):
        assert documents[number].tokens.tolist() == expected.tokens.tolist()
        assert documents[number].supervised.tolist() == expected.supervised.tolist()
    assert manifest.tokens == documents.lengths.sum()
    assert manifest.supervised_tokens == sum(int(documents[i].supervised.sum()) for i in range(6))


def test_shards_are_joined_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dflash_train import prepare as module
    from dflash_train.data import ShardWriter

    monkeypatch.setattr(module, "ShardWriter", lambda folder: ShardWriter(folder, shard_tokens=30))
    path = write_lines(tmp_path / "in.jsonl", *({"text": "x" * n} for n in range(1, 20)))
    manifest = prepare([path], ByteTokenizer(), tmp_path / "out")
    assert len(manifest.shards) > 3
    documents = Documents(tmp_path / "out")
    assert [len(documents[i].tokens) for i in range(19)] == [n + 2 for n in range(1, 20)]


def test_samples_without_a_trainable_token_are_dropped_and_counted(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", {"turns": ["a"]}, {"messages": CHAT}, {"messages": CHAT[:1]})
    assert prepare([path], ByteTokenizer(), tmp_path / "out").dropped == {"no supervised token": 2}
    with pytest.raises(DataError, match=r"no sample of .* \(no supervised token: 1\).* `regenerate` can write"):
        prepare([write_lines(tmp_path / "b.jsonl", {"turns": ["a"]})], ByteTokenizer(), tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_bad_lines_stop_or_are_counted(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", {"messages": CHAT}, b"{\n", {"text": "x" * 100})
    with pytest.raises(DataError, match=r"in\.jsonl:2: not JSON.*pass --skip-bad"):
        prepare([path], ByteTokenizer(), tmp_path / "out", max_tokens=50)
    assert not list(tmp_path.glob("out*"))
    told: list[str] = []
    manifest = prepare([path], ByteTokenizer(), tmp_path / "out", max_tokens=50, skip_bad=True, report=told.append)
    assert (manifest.documents, manifest.dropped) == (1, {"bad": 2})
    assert told[1] == f"{path}:3: 102 tokens are more than --max-tokens 50"


def test_an_existing_folder_is_kept_unless_told(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", {"messages": CHAT})
    prepare([path], ByteTokenizer(), tmp_path / "out")
    with pytest.raises(DataError, match="out exists; pass --overwrite or another -o DIR"):
        prepare([path], ByteTokenizer(), tmp_path / "out")
    prepare([path, path], ByteTokenizer(), tmp_path / "out", overwrite=True)
    assert len(Documents(tmp_path / "out")) == 2


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "manifest.json").unlink(), "has no manifest.json; make it with"),
        (lambda d: (d / "manifest.json").write_text("{"), "cannot be read"),
        (lambda d: (d / "manifest.json").write_text("[]"), "is of version None, this program reads 1"),
        (lambda d: (d / "shard-00000.safetensors").unlink(), "cannot be read"),
        (lambda d: (d / "shard-00000.safetensors").write_bytes(b"12345678"), "cannot be read"),
        (lambda d: save_file({"tokens": np.zeros(3)}, d / "shard-00000.safetensors"), "is not a shard of documents"),
        (lambda d: edit(d, documents=7), "its manifest says 7 of"),
        (lambda d: edit(d, tokens="x"), "tokens must be int, got 'x'"),
        (lambda d: edit(d, shards=["../../etc/passwd"]), "shards must be plain file names"),
    ],
)
def test_a_damaged_folder_is_refused(damage, message: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    prepare([write_lines(tmp_path / "in.jsonl", {"messages": CHAT})], ByteTokenizer(), tmp_path / "out")
    damage(tmp_path / "out")
    with pytest.raises(DataError) as caught:
        Documents(tmp_path / "out")
    assert message in str(caught.value)


def edit(folder: Path, **changes: object) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | changes))


def test_data_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    prepare([write_lines(tmp_path / "in.jsonl", {"messages": CHAT})], ByteTokenizer(), tmp_path / "out")
    with pytest.raises(DataError, match="another tokenizer"):
        Documents(tmp_path / "out", tokenizer="0" * 64)


def packed(tmp_path: Path, lengths: list[int], row_length: int) -> PackedDocuments:
    path = write_lines(tmp_path / "in.jsonl", *({"text": chr(97 + i) * (n - 2)} for i, n in enumerate(lengths)))
    prepare([path], ByteTokenizer(), tmp_path / "out", overwrite=True)
    return PackedDocuments(Documents(tmp_path / "out"), row_length)


def test_rows_hold_whole_documents_side_by_side(tmp_path: Path) -> None:
    rows = packed(tmp_path, [10, 7, 5, 25, 3], 20)
    assert (len(rows), rows.num_cut, rows.fill) == (3, 1, (10 + 7 + 5 + 20 + 3) / 60)
    batch = rows.batch(range(3))
    assert batch.document_numbers == ((3,), (0, 1, 4), (2,))
    assert batch.documents[1].tolist() == [0] * 10 + [1] * 7 + [2] * 3
    assert batch.positions[1].tolist() == [*range(10), *range(7), *range(3)]
    assert batch.tokens[1, 11:16].tolist() == [ord("b")] * 5
    assert batch.documents[2].tolist() == [0] * 5 + [-1] * 15
    assert not batch.loss_mask[2, 5:].any()
    assert batch.loss_mask[2, 1:5].all()


def test_every_document_is_in_one_row_and_no_row_overflows() -> None:
    lengths = np.random.Generator(np.random.Philox(0)).integers(1, 300, 5000)
    rows = plan_rows(lengths, 256)
    assert sorted(n for row in rows for n in row) == list(range(5000))
    assert max(sum(min(256, lengths[n]) for n in row) for row in rows) <= 256
    assert np.minimum(lengths, 256).sum() / (len(rows) * 256) > 0.98
    assert rows == plan_rows(lengths.tolist(), 256)


def test_an_epoch_has_every_row_once_and_the_next_another_order() -> None:
    sampler = RowSampler(10, 3, seed=4)
    stream = [row for batch in range(20) for row in sampler.rows(batch)]
    epochs = [stream[i : i + 10] for i in range(0, 60, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 6
    assert sampler.epoch(10) == 3.0


def test_the_position_in_the_data_is_one_integer() -> None:
    """A new sampler at batch 7 goes on as the old one; the order is pinned for good."""
    sampler = RowSampler(10, 3, seed=4)
    for batch in range(7):
        sampler.rows(batch)
    assert sampler.rows(7) == RowSampler(10, 3, seed=4).rows(7)
    assert RowSampler(10, 3, seed=4).rows(0) == [5, 6, 7]


def test_no_rows_is_a_clear_error() -> None:
    with pytest.raises(DataError, match="there are no rows to train on"):
        RowSampler(0, 1, 0)


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Qwen3's habit: thoughts of turns before the last user turn are dropped from the history.
FORGETFUL = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 < ns.last %}{{ m.content.split('</think>')[-1].lstrip('\\n') }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TAGGED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}<|end|>"
    "{% endif %}{% endfor %}"
)


def save_tokenizer(folder: Path, template: str | None) -> Path:
    """A real byte-level BPE of `tokenizers`, untrained, with ChatML's special tokens."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|end|>", additional_special_tokens=["<|im_start|>", "<|im_end|>"]
    )
    fast.chat_template = template
    fast.save_pretrained(folder)
    return folder


def supervised_text(tokenizer: ChatTokenizer, messages: list[Message]) -> str:
    encoded = tokenizer.encode_conversation(messages)
    inner = tokenizer._tokenizer  # type: ignore[attr-defined]
    pieces = [inner.decode([t]) if s else "·" for t, s in zip(*encoded, strict=True)]
    return "".join(p for p, q in zip(pieces, ["", *pieces], strict=False) if p != "·" or q != "·")


TWO_TURNS = [
    Message("user", "yes?"),
    Message("assistant", " yes\n"),
    Message("user", "yes"),
    Message("assistant", "no"),
]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, "· yes\n<|im_end|>·no<|im_end|>·"),
        (TAGGED, "· yes\n<|im_end|>·no<|im_end|>"),
        (LLAMA2, "·yes\n<|end|>·no<|end|>"),
    ],
    ids=["chatml", "generation tags", "no generation prompt"],
)
def test_the_assistants_words_and_end_token_are_supervised(template: str, expected: str, tmp_path: Path) -> None:
    """ModelOpt #1211: with a template without generation tags, the mask is still not empty."""
    tokenizer = load_tokenizer(str(save_tokenizer(tmp_path, template)))
    assert supervised_text(tokenizer, TWO_TURNS) == expected


def test_a_turn_that_the_template_rewrites_is_supervised_only_as_far_as_it_stands_there(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(save_tokenizer(tmp_path, FORGETFUL)))
    messages = [
        Message("user", "a"), Message("assistant", "<think>hm</think>\nb"),
        Message("user", "c"), Message("assistant", "<think>oh</think>\nd"),
    ]  # fmt: skip
    assert supervised_text(tokenizer, messages) == "·<think>oh</think>\nd<|im_end|>·"


def test_words_of_the_user_that_the_assistant_repeats_stay_unsupervised(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(save_tokenizer(tmp_path, CHATML)))
    messages = [
        Message("user", "say no"),
        Message("assistant", "no"),
        Message("user", "no"),
        Message("assistant", "no"),
    ]
    encoded = tokenizer.encode_conversation(messages)
    assert int(encoded.supervised.sum()) == 2 * (2 + 1)
    ends = np.flatnonzero(np.diff(encoded.supervised.astype(int)) == 1)
    assert len(ends) == 2


def test_a_base_model_needs_a_template_and_can_have_the_plain_one(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, None)
    with pytest.raises(DataError, match="has no chat template; pass --template FILE, or --template plain"):
        load_tokenizer(str(tmp_path))
    tokenizer = load_tokenizer(str(tmp_path), template="plain")
    assert supervised_text(tokenizer, TWO_TURNS[2:]) == "· no<|end|>·"


def test_a_template_that_refuses_a_conversation_names_the_line(tmp_path: Path) -> None:
    template = "{% if messages[0].role != 'user' %}{{ raise_exception('roles must alternate') }}{% endif %}" + CHATML
    tokenizer = load_tokenizer(str(save_tokenizer(tmp_path / "t", template)))
    path = write_lines(tmp_path / "in.jsonl", {"messages": CHAT[1:]})
    with pytest.raises(
        DataError, match=r"in\.jsonl:1: the chat template refuses the conversation: roles must alternate"
    ):
        prepare([path], tokenizer, tmp_path / "out")


def test_the_fingerprint_follows_tokens_template_and_arguments(tmp_path: Path) -> None:
    prints = {
        load_tokenizer(str(save_tokenizer(tmp_path / name, template)), template_args=arguments).fingerprint
        for name, template, arguments in [
            ("a", CHATML, {}), ("b", CHATML, {}), ("c", TAGGED, {}), ("d", CHATML, {"enable_thinking": False}),
        ]
    }  # fmt: skip
    assert len(prints) == 3


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(DataError, match=r"has no tokenizer: none of tokenizer\.json"):
        load_tokenizer(str(tmp_path))


def test_batches_are_torch_tensors_on_the_cpu(tmp_path: Path) -> None:
    batch = packed(tmp_path, [10], 20).batch([0])
    assert batch.tokens.dtype == batch.documents.dtype == batch.positions.dtype == torch.int64
    assert batch.loss_mask.dtype == torch.bool
    assert batch.to("cpu").document_numbers == batch.document_numbers
