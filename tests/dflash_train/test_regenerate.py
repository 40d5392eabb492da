import json
from pathlib import Path

import pytest
import torch
from tiny import qwen36, spread, write_lines

from dflash_train.chat_tokenizers import ByteTokenizer
from dflash_train.config_files import load_config
from dflash_train.conversations import DataError, Message
from dflash_train.prepare import prepare
from dflash_train.regenerate import Sampling, _answer, generate, regenerate
from dflash_train.targets import Target, load_target

pytest.importorskip("transformers")
PROMPTS = [{"turns": [word * n]} for n, word in enumerate(["ab", "c", "def", "g", "hi"], 1)]
SAMPLING = Sampling(temperature=0.8, max_new_tokens=12, seed=3)


@pytest.fixture(scope="module")
def target() -> Target:
    config = load_config("tiny-cpu")
    return load_target(config.target, config.drafter.taps)


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def run(tmp_path: Path, target: Target, name: str = "out.jsonl", sampling: Sampling = SAMPLING, **how: bool) -> Path:
    prompts = write_lines(tmp_path / "prompts.jsonl", *PROMPTS)
    regenerate([prompts], target, ByteTokenizer(), tmp_path / name, sampling=sampling, batch_size=2, **how)
    return tmp_path / name


def test_every_prompt_is_answered_once_with_the_settings_beside(tmp_path: Path, target: Target) -> None:
    records = lines(run(tmp_path, target))
    assert sorted(r["index"] for r in records) == list(range(5))  # type: ignore[type-var]
    for record in records:
        user, assistant = record["messages"]  # type: ignore[misc]
        assert user == {"role": "user", "content": PROMPTS[record["index"]]["turns"][0]}  # type: ignore[index]
        assert assistant["role"] == "assistant"
        assert (record["temperature"], record["seed"], record["target"]) == (0.8, 3, "tiny")


def test_a_broken_run_goes_on_to_the_same_file(tmp_path: Path, target: Target) -> None:
    """Cut anywhere, also in the middle of a line, and continued: byte for byte what an unbroken run writes."""
    whole = run(tmp_path, target).read_bytes()
    for cut in (0, 10, len(whole) // 3, len(whole) // 2, len(whole) - 1, len(whole)):
        part = tmp_path / "out.jsonl"
        part.write_bytes(whole[:cut])
        assert run(tmp_path, target).read_bytes() == whole


def test_greedy_answers_are_the_targets_argmax(tmp_path: Path, target: Target) -> None:
    prompt = ByteTokenizer().encode_prompt([Message("user", "hello")])
    [(answer, _)] = generate(target, [prompt], ByteTokenizer(), Sampling(temperature=0.0, max_new_tokens=9))
    ids = torch.tensor([prompt])
    for token in answer:
        with torch.no_grad():
            logits = target.model(ids).logits[0, -1]
        logits[list(ByteTokenizer.suppressed_ids)] = -torch.inf
        assert int(logits.argmax()) == token
        ids = torch.cat([ids, torch.tensor([[token]])], dim=1)


def test_padding_does_not_change_a_greedy_answer(target: Target) -> None:
    sampling = Sampling(temperature=0.0, max_new_tokens=8)
    prompts = [ByteTokenizer().encode_prompt([Message("user", text)]) for text in ("a", "a longer prompt", "four")]
    together = generate(target, prompts, ByteTokenizer(), sampling)
    assert together == [generate(target, [p], ByteTokenizer(), sampling)[0] for p in prompts]


def test_a_recurrent_target_never_sees_padding() -> None:
    model = spread(qwen36(4))
    model.generation_config.eos_token_id = None  # type: ignore[union-attr]
    masks: list[torch.Tensor] = []
    original = model.generate

    def recording(**inputs: torch.Tensor) -> torch.Tensor:
        masks.append(inputs["attention_mask"])
        out: torch.Tensor = original(**inputs)  # type: ignore[operator]
        return out

    model.generate = recording
    prompts = [[Message("user", text)] for text in ("a", "bcd", "e")]
    batch = _answer([0, 1, 2], prompts, Target(model, (1,)), SmallTokenizer(), Sampling(max_new_tokens=4), seed=0)
    assert [mask.shape for mask in masks] == [(2, 4), (1, 6)]
    assert all(mask.all() for mask in masks)
    assert [len(conversation) for conversation in batch[0]] == [2, 2, 2]


class SmallTokenizer(ByteTokenizer):
    """Of the small models here, which have 120 tokens."""

    ASSISTANT, END, USER, PAD = 110, 111, 112, 113
    pad_id, stop_ids, suppressed_ids = PAD, (END,), (ASSISTANT, USER, PAD)
    _role_ids = {"user": USER, "assistant": ASSISTANT}  # noqa: RUF012


def test_several_turns_are_answered_in_turn_and_old_answers_dropped(tmp_path: Path, target: Target) -> None:
    turns = [("system", "s"), ("user", "a"), ("assistant", "OLD"), ("user", "b")]
    old = [{"role": role, "content": content} for role, content in turns]
    prompts = write_lines(tmp_path / "in.jsonl", {"messages": old}, {"turns": ["one"]})
    regenerate([prompts], target, ByteTokenizer(), tmp_path / "out.jsonl", sampling=SAMPLING)
    by_index = {r["index"]: r["messages"] for r in lines(tmp_path / "out.jsonl")}
    roles = {i: [m["role"] for m in messages] for i, messages in by_index.items()}  # type: ignore[attr-defined]
    assert roles[0] == ["system", "user", "assistant", "user", "assistant"]
    assert "OLD" not in json.dumps(by_index[0])
    assert roles[1] == ["user", "assistant"]


def test_a_line_of_another_program_is_not_continued(tmp_path: Path, target: Target) -> None:
    path = run(tmp_path, target)
    path.write_bytes(path.read_bytes() + b"[]\n")
    with pytest.raises(DataError, match=r"out\.jsonl:6: not a line of ours"):
        run(tmp_path, target)


def test_an_empty_answer_is_kept_and_can_be_prepared(tmp_path: Path) -> None:
    answered = [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]
    more = [*answered, {"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]
    path = write_lines(tmp_path / "in.jsonl", {"messages": answered}, {"messages": more})
    manifest = prepare([path], ByteTokenizer(), tmp_path / "out")
    assert (manifest.documents, manifest.dropped) == (1, {"no two supervised tokens in a row": 1})


def test_other_settings_do_not_continue_a_file(tmp_path: Path, target: Target) -> None:
    run(tmp_path, target)
    with pytest.raises(DataError, match=r"was made with temperature = 0\.8, now 0\.9; pass --overwrite"):
        run(tmp_path, target, sampling=Sampling(temperature=0.9, max_new_tokens=12, seed=3))
    other = run(tmp_path, target, sampling=Sampling(temperature=0.8, max_new_tokens=12, seed=4), overwrite=True)
    assert {r["seed"] for r in lines(other)} == {4}


def test_the_seed_decides_the_answers_and_the_global_generator_is_left_alone(tmp_path: Path, target: Target) -> None:
    torch.manual_seed(1)
    first = run(tmp_path, target, "a.jsonl").read_bytes()
    after = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(after, torch.rand(1))
    torch.manual_seed(2)
    assert run(tmp_path, target, "b.jsonl").read_bytes() == first
    other = run(tmp_path, target, "c.jsonl", sampling=Sampling(temperature=0.8, max_new_tokens=12, seed=4))
    assert [r["messages"] for r in lines(other)] != [r["messages"] for r in lines(tmp_path / "a.jsonl")]


def test_what_the_target_wrote_is_what_is_prepared(tmp_path: Path, target: Target) -> None:
    """Also where a random target writes bytes that are no UTF-8."""
    manifest = prepare([run(tmp_path, target)], ByteTokenizer(), tmp_path / "data")
    assert manifest.documents == 5
    assert manifest.dropped == {}


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([{"text": "x"}], "in.jsonl:1: has no user turn to answer"),
        ([], "has no prompt"),
        ([b"{\n"], "in.jsonl:1: not JSON"),
    ],
)
def test_what_cannot_be_answered_is_refused(
    records: list[object], message: str, tmp_path: Path, target: Target
) -> None:
    prompts = write_lines(tmp_path / "in.jsonl", *records)
    with pytest.raises(DataError) as caught:
        regenerate([prompts], target, ByteTokenizer(), tmp_path / "out.jsonl", sampling=SAMPLING)
    assert message in str(caught.value)


@pytest.mark.parametrize("changes", [{"temperature": -1.0}, {"temperature": float("nan")}, {"max_new_tokens": 0}])
def test_impossible_sampling_is_refused(changes: dict[str, float]) -> None:
    with pytest.raises(DataError):
        Sampling(**changes)  # type: ignore[arg-type]
