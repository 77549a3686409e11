#!/bin/sh
# Fuzzes every decoder for a bounded time: fuzz/run.sh [SECONDS_PER_TARGET] [TARGET...]
#
# Works with the stable toolchain and nothing else installed: these are the flags that cargo-fuzz
# passes, without a sanitizer (there is next to no unsafe code of our own to sanitize; panics,
# overflows, hangs and memory out of proportion are what is looked for). `--target` keeps the
# instrumentation away from build scripts and macros.
set -eu
cd "$(dirname "$0")"
seconds=${1:-5}
[ $# -gt 0 ] && shift

host=$(rustc -vV | sed -n 's/^host: //p')
CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target}
export CARGO_TARGET_DIR
export RUSTFLAGS="--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
-Cllvm-args=-sanitizer-coverage-trace-compares"
cargo build --release --locked --target "$host"

targets=${*:-$(sed -n 's/^name = "\(.*\)"$/\1/p' Cargo.toml | tail -n +2)}
failed=
for target in $targets; do
    mkdir -p "corpus/$target" "artifacts/$target"
    seeds="seeds/$target"
    [ "$target" = model_file ] && seeds="../crates/data/tests/fixtures seeds/shard"
    [ "$target" = hdf5 ] && seeds="../crates/data/tests/fixtures/models"
    log="artifacts/$target/log"
    # Of the directories the first one grows; the seeds are only read.
    if "$CARGO_TARGET_DIR/$host/release/$target" -max_total_time="$seconds" -timeout=10 \
        -rss_limit_mb=1024 -malloc_limit_mb=512 -max_len=4096 -print_final_stats=1 \
        -artifact_prefix="artifacts/$target/" "corpus/$target" $seeds >"$log" 2>&1; then
        executions=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
        echo "$target: ${executions:-no} executions, nothing found"
    else
        failed="$failed $target"
        echo "$target: FAILED"
        grep -v '^#' "$log" | tail -n 40
    fi
done
if [ -n "$failed" ]; then
    echo "error: found by$failed; the inputs are in fuzz/artifacts" >&2
    exit 1
fi
