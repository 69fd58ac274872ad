"""Checkpoints of GPUs: resumed there, loaded on CPU ranks and back, written by processes of their own.

python3 bench/gpu_checkpoints.py PLANC GPUS: prints a line a check. Exit code 1 if one fails."""
import json, pathlib, subprocess, sys, tempfile

planc, gpus = sys.argv[1], int(sys.argv[2])
repo = pathlib.Path(__file__).resolve().parent.parent
FP8 = repo / "examples/llama-tiny-fp8.ron"
MODELS = {
    "bf16": ["--set", "recipe=Bf16"],
    "current": [],
    "delayed": ["--set", "recipe=DelayedScaling(amax_history_len: 8)"],
    "block": ["--set", "recipe=Float8BlockScaling()", "--set", "sequence=128"],
}
# Where a weight is cut through its blocks it has no codes to save.
UNCUT = ["block"]
# Steps before the checkpoint, and in all.
SAVED, STEPS = 3, 13
failed = False


def run(*command):
    done = subprocess.run([str(it) for it in command], capture_output=True, text=True, timeout=200)
    if done.returncode != 0:
        raise RuntimeError(" ".join((done.stdout + done.stderr).split())[-300:])
    return done.stdout


def train(folder, name, mesh, options, device="cuda", launcher=()):
    """Losses of the steps that it trained."""
    metrics = folder / f"{name}.jsonl"
    command = [*launcher, planc, "run", FP8, "--mesh", mesh, "--device", device, "--quiet", "--metrics", metrics]
    run(*command, *options)
    return [json.loads(it)["loss"] for it in open(metrics)] if metrics.exists() else []


def same(folder, a, b):
    run(planc, "ckpt", "verify", folder / b)
    return "the same" in run(planc, "ckpt", "diff", folder / a, folder / b)


def check(what, ok):
    global failed
    failed |= not ok
    print(f"| {what} | {'ok' if ok else 'FAILED'} |", flush=True)


def checkpoints(name, model, mesh, folder):
    straight = train(folder, "straight", mesh, [*model, "--steps", STEPS, "--save", folder / "a", "--save-every", SAVED])
    step = f"step-{SAVED}"
    again = train(folder, "again", mesh, [*model, "--steps", STEPS, "--load", folder / "a" / step])
    check(f"{name} on {mesh}: {len(again)} losses after loading equal those of the run that was not stopped", again == straight[SAVED:] and len(again) == STEPS - SAVED)
    anew = lambda source, target: [*model, "--steps", SAVED, "--load", folder / source, "--save", folder / target]
    other = mesh if name in UNCUT else "2x2" if mesh == "1" else "1"
    train(folder, "cpu", other, anew(f"a/{step}", "cpu"), device="cpu")
    check(f"{name} on {mesh}: through CPU ranks on {other}, every key equal", same(folder, f"a/{step}", "cpu"))
    train(folder, "back", mesh, anew("cpu", "back"))
    check(f"{name} on {mesh}: back on GPUs, every key equal", same(folder, f"a/{step}", "back"))


print("| check | |\n|---|---|")
for name, model in MODELS.items():
    for mesh in ["1", "2x1", "1x2", "2x1x1"][: 4 if gpus > 1 else 1]:
        with tempfile.TemporaryDirectory() as folder:
            try:
                checkpoints(name, model, mesh, pathlib.Path(folder))
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                check(f"{name} on {mesh}: {error}", False)
if gpus > 1:
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        torchrun = ["torchrun", "--no-python", "--nproc_per_node", "2"]
        try:
            options = ["--steps", STEPS, "--save-every", SAVED]
            one = train(folder, "one", "2x1", [*options, "--save", folder / "one"])
            two = train(folder, "two", "2x1", [*options, "--save", folder / "two"], launcher=torchrun)
            check("two processes write the checkpoint of two threads", one == two and same(folder, "one", "two"))
            more = ["--async-save", "--save", folder / "async"]
            three = train(folder, "three", "2x1", [*options, *more], launcher=torchrun)
            check("and in the background", one == three and same(folder, "one", "async"))
            resumed = train(folder, "resumed", "2x1", ["--steps", STEPS, "--load", folder / "two" / f"step-{SAVED}"], launcher=torchrun)
            check("and go on from it", resumed == one[SAVED:])
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            check(f"two processes: {error}", False)
sys.exit(failed)
