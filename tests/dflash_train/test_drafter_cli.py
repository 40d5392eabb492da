import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_export import saved_run
from tiny import write_lines

from dflash_train.cli import main
from dflash_train.config_files import load_config, parse_config
from dflash_train.data import Documents
from dflash_train.import_drafter import import_drafter


def test_prompts_become_answers_and_answers_become_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    prompts = write_lines(tmp_path / "p.jsonl", {"turns": ["abc"]}, {"turns": ["hello"]})
    answers, data = tmp_path / "a.jsonl", tmp_path / "data"
    regenerate = [
        "regenerate",
        "--input",
        str(prompts),
        "--target",
        "tiny",
        "-o",
        str(answers),
        "--max-new-tokens",
        "6",
    ]
    assert main([*regenerate, "--dtype", "float32", "--device", "cpu"]) == 0
    assert main(["prepare", "--input", str(answers), "--tokenizer", "bytes", "-o", str(data)]) == 0
    assert len(Documents(data)) == 2
    out = capsys.readouterr().out.splitlines()
    assert out[0] == f"{answers}: 2 conversations written"
    assert out[1].startswith(f"{data}: 2 documents, ")


def test_bad_lines_stop_or_are_told_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_lines(tmp_path / "in.jsonl", {"text": "fine"}, b"{\n")
    command = ["prepare", "--input", str(path), "--tokenizer", "bytes", "-o", str(tmp_path / "d")]
    assert main(command) == 2
    assert capsys.readouterr().err.startswith(f"dflash-train: {path}:2: not JSON")
    assert main([*command, "--skip-bad"]) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith(f"dflash-train: skipped {path}:2: not JSON")
    assert captured.out.endswith("dropped 1 (bad)\n")


def test_a_run_is_exported(tmp_path: Path) -> None:
    saved_run(tmp_path / "run")
    command = ["export", str(tmp_path / "run"), "-o", str(tmp_path / "out"), "--format", "speculators"]
    assert main([*command, "--verifier", "org/target"]) == 0
    record = json.loads((tmp_path / "out" / "config.json").read_text())
    assert record["speculators_config"]["verifier"]["name_or_path"] == "org/target"
    assert import_drafter(tmp_path / "out")[0].taps == (1, 5)
    assert main(command) == 2


def test_the_resolved_config_is_printed_and_reads_back(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "tiny-cpu", "--set", "loss.kl=0.5"]) == 0
    assert parse_config(capsys.readouterr().out) == load_config("tiny-cpu", ["loss.kl=0.5"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["config", "qwen3"], "neither a preset"),
        (["config", "tiny-cpu", "--set", "loss.klx=1"], "did you mean kl?"),
        (["export", "nowhere", "-o", "x", "--format", "z-lab"], "nowhere has no drafter.safetensors"),
        (["prepare", "--input", "nowhere", "--tokenizer", "bytes", "-o", "x"], "nowhere cannot be read"),
        (["prepare", "--input", "x", "--tokenizer", "nowhere", "-o", "x"], "nowhere is neither a folder"),
        (["regenerate", "--input", "x", "--target", "nowhere", "-o", "x"], "nowhere is neither a folder"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_exit_code_2(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize(
    "arguments", [[], ["prepare"], ["prepare", "--max-tokens", "0"], ["prepare", "--template-arg", "x"]]
)
def test_wrong_usage_is_exit_code_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


def test_the_module_runs_and_help_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; from dflash_train.cli import main; main(['--help'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "regenerate" in done.stdout) == (0, True), done.stderr
    module = [sys.executable, "-m", "dflash_train", "config", "tiny-cpu"]
    assert subprocess.run(module, capture_output=True, text=True, timeout=60, check=True).stdout.startswith("[target]")
