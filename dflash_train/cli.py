"""`python -m dflash_train`: prepare, regenerate, cache-hidden, doctor, train, export, eval, config.

Data on stdout, talk on stderr. Exit: 0 done, 1 a run that failed, 2 could not, 128 + number of the signal that ended a run.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dflash_train.config import ConfigError, RunConfig
from dflash_train.conversations import DataError
from dflash_train.model_files import TargetError

LOGGERS = ("tensorboard", "trackio", "wandb")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="dflash-train", description="Train DFlash drafters for speculative decoding.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (_add_prepare, _add_regenerate, _add_cache_hidden, _add_doctor, _add_train, _add_export, _add_eval, _add_config):
        add(commands)
    options = parser.parse_args(arguments)
    command: Callable[[argparse.Namespace], int | None] = options.command
    try:
        return command(options) or 0
    except (ConfigError, DataError, TargetError) as error:
        print(f"dflash-train: {error}", file=sys.stderr)
        return 2


def _add_prepare(commands: Any) -> None:
    parser = commands.add_parser("prepare", help="tokenize conversations into a folder that can be trained on")
    parser.set_defaults(command=_prepare)
    parser.add_argument("--input", nargs="+", type=Path, required=True, metavar="FILE", help="JSONL files")
    _add_tokenizer(parser, required=True)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--max-tokens", type=_positive, default=32768, help="longer samples are bad input (%(default)s)"
    )
    parser.add_argument("--skip-bad", action="store_true", help="count bad lines and go on")
    parser.add_argument("--overwrite", action="store_true")


def _prepare(options: argparse.Namespace) -> None:
    from dflash_train.chat_tokenizers import load_tokenizer
    from dflash_train.prepare import prepare

    manifest = prepare(
        options.input,
        load_tokenizer(options.tokenizer, options.template, dict(options.template_arg)),
        options.output,
        max_tokens=options.max_tokens,
        skip_bad=options.skip_bad,
        overwrite=options.overwrite,
        report=lambda message: print(f"dflash-train: skipped {message}", file=sys.stderr),
    )
    dropped = "".join(f", dropped {count} ({reason})" for reason, count in manifest.dropped.items())
    print(
        f"{options.output}: {manifest.documents} documents, {manifest.tokens} tokens, "
        f"{manifest.supervised_tokens} supervised{dropped}"
    )


def _add_regenerate(commands: Any) -> None:
    parser = commands.add_parser("regenerate", help="let the target write the answers")
    parser.set_defaults(command=_regenerate)
    parser.add_argument(
        "--input", nargs="+", type=Path, required=True, metavar="FILE", help="JSONL files with user turns"
    )
    parser.add_argument("--target", required=True, metavar="DIR|GGUF|tiny", help="the model that answers")
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="JSONL, continued if unfinished"
    )
    _add_tokenizer(parser, required=False)
    parser.add_argument("--temperature", type=float, default=0.7, help="0 for greedy (%(default)s)")
    parser.add_argument("--max-new-tokens", type=_positive, default=1024, help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-size", type=_positive, default=32, help="prompts at once (%(default)s)")
    parser.add_argument("--device", default=None, help="such as cuda:0 (a GPU if there is one)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python that comes with the model")
    parser.add_argument("--overwrite", action="store_true")


def _regenerate(options: argparse.Namespace) -> None:
    from dflash_train.chat_tokenizers import load_tokenizer
    from dflash_train.config import TargetConfig
    from dflash_train.regenerate import Sampling, regenerate
    from dflash_train.targets import load_target

    sampling = Sampling(temperature=options.temperature, max_new_tokens=options.max_new_tokens, seed=options.seed)
    source = options.tokenizer or ("bytes" if options.target == "tiny" else options.target)
    tokenizer = load_tokenizer(source, options.template, dict(options.template_arg))
    settings = TargetConfig(path=options.target, dtype=options.dtype, trust_remote_code=options.trust_remote_code)
    target = load_target(settings, (), _device(options.device))
    written = regenerate(
        options.input,
        target,
        tokenizer,
        options.output,
        sampling=sampling,
        batch_size=options.batch_size,
        overwrite=options.overwrite,
    )
    print(f"{options.output}: {written} conversations written")


def _add_train(commands: Any) -> None:
    parser = commands.add_parser("train", help="train a drafter; under torchrun, one process for each host")
    parser.set_defaults(command=_train)
    _add_run_settings(parser)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="RUN", help="folder of the run")
    parser.add_argument("--resume", action="store_true", help="go on from the last complete checkpoint, if there is one")
    parser.add_argument("--log", action="append", default=[], choices=LOGGERS, help="besides metrics.jsonl")
    parser.add_argument("--no-live", dest="live", action="store_false", help="lines alone, also on a terminal with rich")


def _add_run_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="PRESET|FILE")
    for role in ("target", "drafter"):
        parser.add_argument(
            f"--{role}-devices",
            f"--{role}-gpus",
            metavar="DEVICES",
            help=f"such as 0-4, or cpu,cpu, or cuda:0,cuda:0: one thread each (sets train.{role}_devices)",
        )
    parser.add_argument(
        "--set", action="append", default=[], metavar="A.B=V", help="override a setting; may be repeated"
    )


def _run_settings(options: argparse.Namespace) -> RunConfig:
    from dflash_train.config_files import load_config

    overrides = list(options.set)
    for role in ("target", "drafter"):
        devices = getattr(options, f"{role}_devices")
        if devices is not None:
            overrides.append(f"train.{role}_devices={json.dumps(devices)}")
    return load_config(options.source, overrides)


def _add_cache_hidden(commands: Any) -> None:
    parser = commands.add_parser("cache-hidden", help="keep a target's hidden states on disk, to train from without it")
    parser.set_defaults(command=_cache_hidden)
    _add_run_settings(parser)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="gone on with if unfinished")
    parser.add_argument("--size-only", action="store_true", help="tell the size, and write nothing")


def _cache_hidden(options: argparse.Namespace) -> None:
    from dflash_train.devices import target_groups
    from dflash_train.hidden_cache import cache_hidden

    config = _run_settings(options)
    cache_hidden(config, options.output, target_groups(config), _talk, size_only=options.size_only)
    if not options.size_only:
        print(options.output)


def _talk(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _add_doctor(commands: Any) -> None:
    parser = commands.add_parser("doctor", help="will a run fit, and how fast will it be")
    parser.set_defaults(command=_doctor)
    _add_run_settings(parser)
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="length of the probe; 0 for none, loading nothing (%(default)s)"
    )


def _doctor(options: argparse.Namespace) -> None:
    from dflash_train.doctor import diagnose

    diagnose(_run_settings(options), print, seconds=options.seconds)


def _train(options: argparse.Namespace) -> int:
    from dflash_train.live import can_show
    from dflash_train.trainer import TrainingError, train

    config = _run_settings(options)
    try:
        live = options.live and can_show()
        outcome = train(config, options.output, resume=options.resume, log=options.log, report=_talk, live=live)
    except TrainingError as error:
        print(f"dflash-train: {error}", file=sys.stderr)
        return 1
    if outcome.signal:
        hint = f"{options.output} stopped by {signal.Signals(outcome.signal).name} at step {outcome.progress.step}"
        print(f"dflash-train: {hint}; the same command with --resume goes on", file=sys.stderr)
        return 128 + outcome.signal
    print(outcome.checkpoint)
    return 0


def _add_export(commands: Any) -> None:
    parser = commands.add_parser("export", help="write a drafter in a format that servers read")
    parser.set_defaults(command=_export)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run, or of one of its steps")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--format", choices=["z-lab", "speculators"], required=True)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--verifier", metavar="NAME", help="name under which servers find the target (speculators)")
    parser.add_argument("--overwrite", action="store_true")


def _export(options: argparse.Namespace) -> None:
    from dflash_train.export import export_run

    export_run(
        options.run,
        options.output,
        format=options.format,
        dtype=options.dtype,
        verifier=options.verifier,
        overwrite=options.overwrite,
    )
    print(f"{options.output}: {options.format} format, {options.dtype}")


def _add_eval(commands: Any) -> None:
    parser = commands.add_parser("eval", help="measure acceptance length and speed of a drafter by decoding")
    parser.set_defaults(command=_eval)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run, or of one of its steps")
    parser.add_argument("--prompts", nargs="+", type=Path, required=True, metavar="FILE", help="JSONL, one task each")
    _add_tokenizer(parser, required=False)
    parser.add_argument("--mode", type=_names, default="ar,chain,ddtree,lookup", help="(%(default)s)")
    parser.add_argument("--budget", type=_positives, default="64", help="drafted nodes of ddtree (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 for greedy (%(default)s)")
    parser.add_argument("--top-p", type=float, default=1.0, help="(%(default)s)")
    parser.add_argument("--max-new-tokens", type=_positive, default=256, help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-size", type=_positive, default=1, help="prompts at once (%(default)s)")
    parser.add_argument("--limit", type=_positive, help="first prompts of each file only")
    parser.add_argument("--compile", action="store_true", help="compile the passes of target and drafter in a step")
    parser.add_argument("--device", default=None, help="such as cuda:0 (a GPU if there is one)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the report there")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="draw it there (needs matplotlib)")
    parser.add_argument("--overwrite", action="store_true")


def _eval(options: argparse.Namespace) -> None:
    from dflash_train.chat_tokenizers import ChatTokenizer, load_tokenizer
    from dflash_train.decode import DecodeConfig
    from dflash_train.evaluate import evaluate, format_table
    from dflash_train.plots import check_plots, plot_report

    # Said before the work and not after it.
    if options.json is not None and options.json.exists() and not options.overwrite:
        raise ConfigError(f"{options.json} exists; pass --overwrite or --json another file")

    if options.plots is not None:
        check_plots()
    device = _device(options.device)

    def tokenizer(target: str) -> ChatTokenizer:
        source = options.tokenizer or ("bytes" if target == "tiny" else target)
        return load_tokenizer(source, options.template, dict(options.template_arg))

    report = evaluate(
        options.run,
        options.prompts,
        tokenizer,
        modes=options.mode,
        budgets=options.budget,
        config=DecodeConfig(
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            seed=options.seed,
        ),
        batch_size=options.batch_size,
        limit=options.limit,
        device=device,
        compile=options.compile,
    )
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", "utf-8")
    print(format_table(report))
    if options.plots is not None:
        for path in plot_report(report, options.plots):
            print(f"dflash-train: {path}", file=sys.stderr)


def _add_config(commands: Any) -> None:
    parser = commands.add_parser("config", help="print a preset or file with every setting resolved")
    parser.set_defaults(command=_config)
    parser.add_argument("source", metavar="PRESET|FILE")
    parser.add_argument(
        "--set", action="append", default=[], metavar="A.B=V", help="override a setting; may be repeated"
    )


def _config(options: argparse.Namespace) -> None:
    from dflash_train.config_files import dump_config, load_config

    print(dump_config(load_config(options.source, options.set)), end="")


def _add_tokenizer(parser: argparse.ArgumentParser, *, required: bool) -> None:
    parser.add_argument("--tokenizer", required=required, metavar="DIR|GGUF|bytes", help="a model's folder or file")
    parser.add_argument("--template", metavar="FILE|plain", help="a chat template instead of the tokenizer's own")
    parser.add_argument(
        "--template-arg",
        action="append",
        default=[],
        type=_name_and_value,
        metavar="NAME=VALUE",
        help="passed to the template, such as enable_thinking=false; may be repeated",
    )


def _device(name: str | None) -> str:
    """The device that is named, or a GPU if there is one."""
    import torch

    chosen = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:  # a build without CUDA asserts
        there = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"--device {chosen} cannot be used: {reason}. There are {', '.join(there)}") from error
    return chosen


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _positives(text: str) -> list[int]:
    return [_positive(number) for number in text.split(",")]


def _name_and_value(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, got {text!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
