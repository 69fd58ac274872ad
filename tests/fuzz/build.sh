#!/usr/bin/env bash
# Builds the fuzz targets into the folder named as $1, as stripped binaries that run on any x86-64 Linux with the C
# library of this one or a later one.
#
# This is what `cargo fuzz build --sanitizer none` does, with the C++ library linked in. (libFuzzer replaces functions
# of the C library, so that one cannot be.)
set -euo pipefail
out=$(mkdir -p "$1" && cd "$1" && pwd)
cd "$(dirname "$0")"
coverage=(-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4
  -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table
  -Cllvm-args=-sanitizer-coverage-trace-compares)
export CXXSTDLIB=static=stdc++
export RUSTFLAGS="${coverage[*]} --cfg fuzzing -Lnative=$(dirname "$(g++ -print-file-name=libstdc++.a)")"
triple=x86_64-unknown-linux-gnu
cargo +nightly build --release --bins --target "$triple"
for it in frames metadata model plan profile; do
  strip -o "$out/$it" "target/$triple/release/$it"
done
