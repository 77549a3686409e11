#!/usr/bin/env bash
# Runs every benchmark, each against a peer or a physical limit in the same run, prints a table of
# ratios and exits with 1 when a target is missed. Names of rows restrict it: bench/run.sh network step
# The rows of `python` need a Python with torch and the client's dependencies: SKEP_PYTHON or python3.
# Those of `inference` need one with flask, gunicorn, onnx, onnxruntime and pillow: SKEP_ONNX_PYTHON,
# SKEP_PYTHON or python3.
set -euo pipefail
cd "$(dirname "$0")/.."
target="${CARGO_TARGET_DIR:-target}"
cargo build --release --quiet -p skep -p skep-bench -p skep-learn --bins --example step
python=no others=()
[ $# -gt 0 ] || python=yes
for row in "$@"; do
  if [ "$row" = python ]; then python=yes; else others+=("$row"); fi
done

missed=0
if [ $# -eq 0 ] || [ ${#others[@]} -gt 0 ]; then
  "$target/release/skep-bench" "${others[@]}" || missed=1
else
  printf '%s\n' "| what | Skep | peer or limit | ratio | target | |" "|---|---|---|---|---|---|"
fi
if [ $python = yes ]; then
  for candidate in "${SKEP_PYTHON:-}" python3 /usr/bin/python3 none; do
    "$candidate" -c 'import torch, numpy, safetensors, urllib3' 2>/dev/null && break
  done
  if [ "$candidate" = none ]; then
    echo "| Python workers |  | skipped: no torch |  |  |  |"
  else
    SKEP_BINARY="$target/release/skep" "$candidate" bench/python.py --no-header || missed=1
  fi
fi
exit $missed
