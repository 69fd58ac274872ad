"""Trains llama-tiny of tests/golden/llama-f32 with planc on GPUs and compares every step with PyTorch.

python3 bench/golden.py PLANC GPUS: prints a line a configuration; exit code 1 if one is off."""
import json, os, subprocess, sys, tempfile

planc, gpus = sys.argv[1], int(sys.argv[2])
here = os.path.dirname(os.path.abspath(__file__))
golden = os.path.join(here, "../tests/golden/llama-f32")
reference = json.load(open(os.path.join(golden, "losses.json")))["torch_f64"]
bf16 = json.load(open(os.path.join(golden, "losses_bf16.json")))

# f32: another order of sums than float64's run, 20 updates; bf16: see LOSS_BF16 in tests/train.rs.
F32, BF16 = 1e-4, 3e-3
MODES = {
    "f32": ([], reference, F32),
    "bf16": (["--set", "precision=(compute: bf16, reduce: f32)"], bf16, BF16),
}
OPTIONS = {
    "": [],
    "checkpointing": ["--set", "checkpoint=Full"],
    "2 micro-batches": ["--set", "micro_batches=2"],
    "the loss in 3 chunks": ["--set", "layers[3].chunks=3"],
}


def losses(mesh, args):
    with tempfile.TemporaryDirectory() as folder:
        metrics = os.path.join(folder, "metrics.jsonl")
        command = [planc, "run", os.path.join(here, "../examples/llama-tiny.ron"), "--mesh", mesh]
        command += ["--device", "cuda", "--steps", "20", "--quiet", "--metrics", metrics]
        command += ["--weights", os.path.join(golden, "init.safetensors")]
        command += ["--data", os.path.join(golden, "tokens.safetensors")] + args
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode != 0:
            return run.stderr.strip().replace("\n", " ")
        return [json.loads(it) for it in open(metrics)]


failed = False
print("| mesh | compute | with | largest difference of a loss | of a gradient norm (relative) | allowed | |")
print("|---|---|---|---|---|---|---|")
for mesh in ["1"] + (["2", "1x2"] if gpus > 1 else []):
    for mode, (args, expected, tolerance) in MODES.items():
        for name, option in OPTIONS.items():
            steps = losses(mesh, args + option)
            if isinstance(steps, str):
                print(f"| {mesh} | {mode} | {name} | {steps} | | | FAILED |")
                failed = True
                continue
            found = [it["loss"] for it in steps]
            norms = [it["grad_norm"] for it in steps]
            worst = max(abs(a - b) if a is not None else float("inf") for a, b in zip(found, expected["loss"]))
            norm = max(abs(a / b - 1) if a is not None else float("inf") for a, b in zip(norms, expected["grad_norm"]))
            ok = len(found) == 20 and worst <= tolerance
            failed |= not ok
            print(f"| {mesh} | {mode} | {name} | {worst:.1e} | {norm:.1e} | {tolerance:.0e} | {'ok' if ok else 'FAILED'} |", flush=True)
sys.exit(failed)
