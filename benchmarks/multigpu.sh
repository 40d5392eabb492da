#!/usr/bin/env bash
# All runs of a host with several GPUs in one go: figures to OUT/multigpu.json, a log beside it. `--logical-devices N` makes do with one.
#   benchmarks/multigpu.sh OUT [options of python -m benchmarks.multigpu]
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:?give a folder for the results}
shift
mkdir -p "$out"
# NVLink's multicast is refused on many shared hosts, and nothing here needs it.
export NCCL_NVLS_ENABLE=0 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TORCHINDUCTOR_COMPILE_THREADS="${TORCHINDUCTOR_COMPILE_THREADS:-2}"
"${PYTHON:-python}" -m benchmarks.multigpu --json "$out/multigpu.json" "$@" 2>&1 | tee "$out/multigpu.log"
