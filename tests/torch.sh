#!/usr/bin/env bash
# Prints the path of a Python that has PyTorch (CPU), with which tests read and write checkpoints as
# PyTorch does. Gets it from PyPI the first time: 550 MB down, 1.3 GB on disk, in ~/.cache/planc, which
# clones share. Needs Linux, python3 (3.10 to 3.14) with pip, cc and readelf.
set -euo pipefail
cd "$(dirname "$0")/torch"
wanted=$(cat requirements.txt slim_torch_stubs.py <(python3 -VV) <(uname -m) | cksum | cut -d' ' -f1)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/planc
folder=$cache/torch-$wanted
python=$folder/bin/python
if [ -x "$python" ]; then
    echo "$python"
    exit
fi
fail() {
    echo "PyTorch is needed to test that it reads our checkpoints: $1" >&2
    exit 1
}
for tool in cc readelf flock; do
    command -v "$tool" >/dev/null || fail "\`$tool\` is not there (binutils, gcc and util-linux have them)"
done
mkdir -p "$cache"
# Whoever comes second waits, and finds it there.
exec 9>"$folder.lock"
flock 9
if [ ! -x "$python" ]; then
    # Into a folder of its own first, so that one that is there is whole.
    part=$folder.part
    rm -rf "$part"
    python3 -m venv --without-pip "$part" >&2 || fail "python3 cannot make a venv"
    packages=$("$part/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    # pip unpacks beside the target, for a rename instead of a copy.
    TMPDIR=$part PIP_ROOT_USER_ACTION=ignore python3 -m pip install --quiet --disable-pip-version-check \
        --no-deps --no-compile --no-cache-dir --target "$packages" -r requirements.txt >&2 ||
        fail "it could not be had from PyPI (python3 with pip, and a network, are needed the first time)"
    python3 slim_torch_stubs.py "$packages" >&2 || fail "libraries could not be made for it"
    # An import that also compiles what it imports: a third of the time from then on.
    env -u PYTHONDONTWRITEBYTECODE "$part/bin/python" -c 'import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp, torch.distributed.tensor, torch.multiprocessing, safetensors.torch' >&2 ||
        fail "it was installed but cannot be imported"
    mv "$part" "$folder"
fi
echo "$python"
