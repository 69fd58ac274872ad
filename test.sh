#!/usr/bin/env bash
# Everything that must hold: format, lints, every test, docs. Needs Rust, a C compiler, and Python with
# pip, which gets the compiler of CUDA kernels and PyTorch (tests/torch.sh) the first time; no GPU.
set -euo pipefail
cd "$(dirname "$0")"
cargo fmt --all --check
cargo clippy --workspace --all-targets -- -D warnings
LD_LIBRARY_PATH=$(tests/nvrtc.sh)${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export LD_LIBRARY_PATH
PLANC_TORCH_PYTHON=$(tests/torch.sh)
export PLANC_TORCH_PYTHON
cargo test --workspace
RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps
