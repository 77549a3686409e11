#!/usr/bin/env bash
# Runs every benchmark, each against a peer or a physical limit in the same run, prints a table of
# ratios and exits with 1 when a target is missed. Names of rows restrict it: bench/run.sh push pull
set -euo pipefail
cd "$(dirname "$0")/.."
cargo build --release --quiet -p skep -p skep-bench -p skep-learn --bins --example step
exec "${CARGO_TARGET_DIR:-target}/release/skep-bench" "$@"
