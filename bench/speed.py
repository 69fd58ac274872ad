"""Times planc beside PyTorch (bench/peers/llama.py) on the same GPUs, in the same run, and prints a table.

python3 bench/speed.py PLANC GPUS [NAME...]: only the configurations named. Same precision policy on
both sides: f32 master weights, bf16 compute, gradients reduced in f32; no activation checkpointing."""
import json, os, re, subprocess, sys

planc, gpus, names = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
here = os.path.dirname(os.path.abspath(__file__))
model = os.path.join(here, "../examples/llama3-8b.ron")
LAYERS8 = ["--set", "layers[1].n=8"]

# name: GPUs, planc's arguments, the peer's arguments
CONFIGURATIONS = {
    "8-layers": (1, ["--mesh", "1", "--set", "batch=Global(1)"] + LAYERS8, ["--layers", "8"]),
    "8-layers-fsdp2": (2, ["--mesh", "2x1", "--set", "batch=Global(2)"] + LAYERS8, ["--layers", "8"]),
    "8-layers-tp2": (2, ["--mesh", "1x2", "--set", "batch=Global(2)"] + LAYERS8, ["--layers", "8", "--tp", "2", "--bs", "2"]),
    "8b-fsdp2": (2, ["--mesh", "2x1", "--set", "batch=Global(2)"] + ["--set", 'checkpoint=Recompute(["glu"])'], ["--layers", "32"]),
}


def run(command, seconds=280):
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired as error:
        return "", f"no end after {seconds} s: {error.stderr}"
    return result.stdout, "" if result.returncode == 0 else (result.stdout + result.stderr)[-1500:]


def peer(n, args):
    out, error = run(["torchrun", "--nproc_per_node", str(n), os.path.join(here, "peers/llama.py")] + args)
    found = re.search(r"step=([\d.]+)ms .*mem=([\d.]+)GiB first=([\d.]+)s", out)
    if not found:
        print("peer failed:", error or out, flush=True)
        return None
    return {"ms": float(found[1]), "gib": float(found[2]), "first": float(found[3])}


def ours(args):
    command = [planc, "bench", model, "--device", "cuda", "--format", "json", "--set", "sequence=8192", "--set", "precision.reduce=f32"]
    out, error = run(command + args)
    if error:
        print("planc failed:", error, flush=True)
        return None
    return json.loads(out)


failed = False
rows = []
for name, (n, planc_args, peer_args) in CONFIGURATIONS.items():
    if (names and name not in names) or n > gpus:
        continue
    a, b = ours(planc_args), (None if os.environ.get("NO_PEER") else peer(n, peer_args))
    if a is None:
        failed = True
        continue
    instructions = sorted(a.pop("instructions_ms").items(), key=lambda it: -it[1][1])
    print(name, json.dumps(a))
    for what, (count, ms) in instructions[:24]:
        print(f"    {ms:8.2f} ms {count:4} x {what[:150]}", flush=True)
    memory = a["memory"]
    total = (memory["arenas"] + memory["workspace"] + memory["other"]) / 2**30
    failed |= memory["arenas"] != memory["planned_arenas"] or memory["other"] > memory["other_declared"]
    kinds = ", ".join(f"{k} {v:.1f}" for k, v in a["time_ms"].items())
    ratio = f"{a['step_ms'] / b['ms']:.3f}" if b else "-"
    rows.append(
        f"| {name} | {a['step_ms']:.1f} | {b['ms'] if b else '-'} | {ratio} | {a['model_tflops']:.0f} / {a['executed_tflops']:.0f} | "
        f"{(memory['arenas'] + memory['workspace']) / 2**30:.1f} + {memory['other'] / 2**30:.2f} (declared {memory['other_declared'] / 2**30:.2f}) | "
        f"{b['gib'] if b else '-'} | {a['first_s']:.1f} / {b['first'] if b else '-'} | {kinds} |"
    )
print("\n| configuration | planc ms | PyTorch ms | ratio | TFLOP/s MFU / executed | planc GiB: planned + other | PyTorch GiB allocated | first step s | planc by kind, ms |")
print("|---|---|---|---|---|---|---|---|---|")
print("\n".join(rows))
sys.exit(failed)
