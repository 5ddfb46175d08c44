#!/usr/bin/env bash
# All rows of the table of ratios that need a GPU, in at most eight minutes on one GPU:
#   OUT=folder benchmarks/gpu.sh [--toy]        # --toy also runs on a CPU
# Writes OUT/gpu.md (the contestants), OUT/gpu.json (for benchmarks/run_all.py --add OUT/gpu.json).
set -euo pipefail
cd "$(dirname "$0")/.."
export OUT="${OUT:-.}" PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$OUT"
exec timeout 480 "${PYTHON:-python}" benchmarks/gpu.py --rows "$OUT/gpu.md" --run-json "$OUT/gpu.json" "$@"
