#!/usr/bin/env bash
# Everything that only GPUs can show: kernels against their references, the golden run, training under
# each recipe, checkpoints, speed beside PyTorch, faults. Needs a built planc, GPUs, and a Python with
# torch (for the peers).
#
#   cargo build --release && bench/gpu.sh [check] [golden] [recipes] [checkpoints] [speed [NAME...]] [faults]
#
# PLANC names another binary. Without arguments all parts run. Exit code 1 if one failed.
set -uo pipefail
cd "$(dirname "$0")/.."
planc=${PLANC:-$PWD/target/release/planc}
gpus=$(nvidia-smi --list-gpus | wc -l)
parts=("$@")
[ ${#parts[@]} -eq 0 ] && parts=(check golden recipes checkpoints speed faults)
failed=0
part() { echo; echo "## $1"; echo; shift; "$@" || { echo "FAILED: $*"; failed=1; }; }
while [ ${#parts[@]} -gt 0 ]; do
    name=${parts[0]}
    parts=("${parts[@]:1}")
    case $name in
    check) part "Machine and kernels" "$planc" doctor --check ;;
    golden) part "Golden run" python3 bench/golden.py "$planc" "$gpus" ;;
    checkpoints) part "Checkpoints" python3 bench/gpu_checkpoints.py "$planc" "$gpus" ;;
    recipes) part "Recipes" python3 bench/recipes.py "$planc" cuda ;;
    speed)
        part "Speed" python3 bench/speed.py "$planc" "$gpus" "${parts[@]}"
        parts=()
        ;;
    faults) part "Faults" python3 bench/faults.py "$planc" "$gpus" ;;
    *)
        echo "unknown part: $name" >&2
        exit 2
        ;;
    esac
done
exit $failed
