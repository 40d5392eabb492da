#!/usr/bin/env bash
# A whole training, as an example to copy: conversations in, answers by the target, a drafter out.
# One GPU or several; a second host adds `torchrun --nnodes 2 --nproc-per-node 1 --max-restarts 3 …` (docs/trainer.md).
#   ./start_training.sh MODEL_FOLDER prompts.jsonl RUN_FOLDER [further options of dflash-train train]
set -euo pipefail
if [ $# -lt 3 ]; then
    echo "usage: $0 MODEL_FOLDER prompts.jsonl RUN_FOLDER [options of dflash-train train]" >&2
    exit 2
fi
model=$1 prompts=$2 run=$3
shift 3
preset=${PRESET:-qwen3-8b} tokenizer=${TOKENIZER:-$model}

mkdir -p "$run"
# Both steps go on where they stopped, or are skipped once done.
dflash-train regenerate --input "$prompts" --target "$model" --tokenizer "$tokenizer" -o "$run/answers.jsonl"
[ -f "$run/data/manifest.json" ] ||
    dflash-train prepare --input "$run/answers.jsonl" --tokenizer "$tokenizer" -o "$run/data"
exec dflash-train train "$preset" -o "$run" --resume --set "target.path=$model" --set "data.path=$run/data" "$@"
