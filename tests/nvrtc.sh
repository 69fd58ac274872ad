#!/usr/bin/env bash
# Prints the folder of NVRTC, with which tests compile our CUDA kernels; no GPU is needed. Gets it from
# PyPI the first time.
set -euo pipefail
cd "$(dirname "$0")/.."
version=13.0.88
target=${CARGO_TARGET_DIR:-$PWD/target}/nvrtc-$version
folder=$target/nvidia/cu13/lib
if [ ! -e "$folder/libnvrtc.so.13" ]; then
    # Into a folder of its own first, so that one that is there is whole.
    part=$target.part
    rm -rf "$part"
    if ! PIP_ROOT_USER_ACTION=ignore python3 -m pip install --quiet --disable-pip-version-check --no-deps --target "$part" "nvidia-cuda-nvrtc==$version" >&2; then
        echo "NVRTC is needed to compile the CUDA kernels: nvidia-cuda-nvrtc $version could not be had" \
            "from PyPI (python3 with pip, and a network, are needed the first time)" >&2
        exit 1
    fi
    rm -rf "$target"
    mv "$part" "$target"
fi
echo "$folder"
