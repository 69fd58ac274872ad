#!/usr/bin/env bash
# Everything that must hold: format, lints, every test, docs. Needs Rust and nothing else.
set -euo pipefail
cd "$(dirname "$0")"
cargo fmt --all --check
cargo clippy --workspace --all-targets -- -D warnings
cargo test --workspace
RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps
