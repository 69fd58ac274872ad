#!/usr/bin/env bash
# Everything that must hold: format, lints, every test, docs. Needs Rust, a C compiler, and Python with
# pip, which gets the compiler of CUDA kernels and PyTorch (tests/torch.sh) the first time, and Chromium
# (tests/chromium.sh), which Debian's apt-get gets; no GPU.
set -euo pipefail
cd "$(dirname "$0")"
# `cargo fmt` does not see files whose modules a macro declares.
rustfmt --check $(git ls-files '*.rs')
cargo clippy --workspace --all-targets -- -D warnings
LD_LIBRARY_PATH=$(tests/nvrtc.sh)${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export LD_LIBRARY_PATH
PLANC_TORCH_PYTHON=$(tests/torch.sh)
export PLANC_TORCH_PYTHON
PLANC_CHROMIUM=$(tests/chromium.sh)
export PLANC_CHROMIUM
cargo test --workspace
RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps
