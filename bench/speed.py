"""Times planc beside PyTorch and torchao (bench/peers/llama.py) on the same GPUs, in the same run, and prints a table.

python3 bench/speed.py PLANC GPUS [NAME...]: only the configurations named. Same precision policy on
both sides: f32 master weights, bf16 compute, gradients reduced in f32; no activation checkpointing.
TransformerEngine is not run: its time is that of shared/facts/gpu-baselines.md (2026-11-29, two H200s),
times PyTorch's in this run over PyTorch's there."""
import functools, json, os, re, subprocess, sys

planc, gpus, names = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
here = os.path.dirname(os.path.abspath(__file__))
model = os.path.join(here, "../examples/llama3-8b.ron")


def layers(n):
    return ["--set", f"layers[1].n={n}"]


def recipe(name):
    return ["--set", f"recipe={name}()"]


CHUNKS = ["--set", "layers[3].chunks=4"]
ONE, FSDP, TP = (["--mesh", it, "--set", f"batch=Global({n})"] for it, n in [("1", 1), ("2x1", 2), ("1x2", 2)])
WHOLE = ["--set", 'checkpoint=Recompute(["glu"])']
AGAIN = ["--set", 'checkpoint=Recompute(["glu", "quantize", "transpose", "rms_norm"])']
# A layer between an embedding and a head of 256 words, which take next to nothing.
ALONE = ONE + layers(1) + ["--set", "layers[0].vocab=256"]
CURRENT, DELAYED, BLOCK = map(recipe, ["Float8CurrentScaling", "DelayedScaling", "Float8BlockScaling"])

# name: GPUs, planc's arguments, the peer's arguments, whether torchao runs, too, and milliseconds of
# TransformerEngine and of PyTorch in bf16 in the table.
CONFIGURATIONS = {
    "8-layers": (1, ONE + layers(8), ["--layers", "8"], False, None),
    "8-layers-chunks": (1, ONE + layers(8) + CHUNKS, ["--layers", "8"], False, None),
    "8-layers-fsdp2": (2, FSDP + layers(8), ["--layers", "8"], False, None),
    "8-layers-tp2": (2, TP + layers(8), ["--layers", "8", "--tp", "2", "--bs", "2"], False, None),
    "8b-fsdp2": (2, FSDP + WHOLE, ["--layers", "32"], False, None),
    "1-layer-current": (1, ALONE + CURRENT, None, False, None),
    "1-layer-delayed": (1, ALONE + DELAYED, None, False, None),
    "1-layer-block": (1, ALONE + BLOCK, None, False, None),
    "8-layers-current": (1, ONE + layers(8) + CURRENT, ["--layers", "8"], True, (209.3, 259.8)),
    "8-layers-delayed": (1, ONE + layers(8) + DELAYED, ["--layers", "8"], True, (205.7, 259.8)),
    "8-layers-block": (1, ONE + layers(8) + BLOCK, ["--layers", "8"], True, (221.4, 259.8)),
    "8-layers-fsdp2-current": (2, FSDP + layers(8) + CURRENT, ["--layers", "8"], True, (215.2, 261.5)),
    "8b-fsdp2-current": (2, FSDP + AGAIN + CURRENT, ["--layers", "32"], True, (690.4, 856.8)),
}
# One TransformerLayer of TransformerEngine, forward and backward, in the table: milliseconds.
LAYER_TE = {"1-layer-current": 15.14, "1-layer-delayed": 14.55, "1-layer-block": 17.12}


def run(command, seconds=280):
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired as error:
        return "", f"no end after {seconds} s: {error.stderr}"
    return result.stdout, "" if result.returncode == 0 else (result.stdout + result.stderr)[-1500:]


@functools.cache
def peer(n, mode, *args):
    """Milliseconds, GiB and seconds of the first step of a peer that several configurations may share."""
    script = os.path.join(here, "peers/llama.py")
    out, error = run(["torchrun", "--nproc_per_node", str(n), script, "--mode", mode, *args])
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


def cells(milliseconds, other):
    """A peer's time and ours over it."""
    return f"{other:.1f} | {milliseconds / other:.3f}" if other else "- | -"


failed = False
rows, layer_ms = [], {}
for name, (n, planc_args, peer_args, torchao, table) in CONFIGURATIONS.items():
    if (names and name not in names) or n > gpus:
        continue
    a = ours(planc_args)
    modes = ["bf16", "fp8"][: 1 + torchao] if peer_args and not os.environ.get("NO_PEER") else []
    b, c = ([peer(n, it, *peer_args) for it in modes] + [None, None])[:2]
    if a is None:
        failed = True
        continue
    instructions = sorted(a.pop("instructions_ms").items(), key=lambda it: -it[1][1])
    print(name, json.dumps(a))
    for what, (count, ms) in instructions[:40]:
        print(f"    {ms:8.2f} ms {count:4} x {what[:150]}", flush=True)
    memory = a["memory"]
    failed |= memory["arenas"] != memory["planned_arenas"] or memory["other"] > memory["other_declared"]
    kinds = ", ".join(f"{k} {v:.1f}" for k, v in a["time_ms"].items())
    layer_ms[name] = a["step_ms"] - a["time_ms"].get("optimizer", 0.0)
    te = table and b and table[0] * b["ms"] / table[1]
    rows.append(
        f"| {name} | {a['step_ms']:.1f} | {cells(a['step_ms'], b and b['ms'])} | {cells(a['step_ms'], c and c['ms'])} | {cells(a['step_ms'], te)} | "
        f"{a['model_tflops']:.0f} / {a['executed_tflops']:.0f} | "
        f"{(memory['arenas'] + memory['workspace']) / 2**30:.1f} + {memory['other'] / 2**30:.2f} (declared {memory['other_declared'] / 2**30:.2f}) | "
        f"{' / '.join(str(it['gib']) for it in (b, c) if it) or '-'} | {' / '.join(str(it['first']) for it in (b, c) if it) or '-'} against {a['first_s']:.1f} | {kinds} |"
    )
    print(rows[-1], flush=True)
print("\n| configuration | planc ms | PyTorch ms | ratio | torchao ms | ratio | TE ms (by the table) | ratio | TFLOP/s MFU / executed | planc GiB: planned + other | peers GiB allocated | first step s | planc by kind, ms |")
print("|---|---|---|---|---|---|---|---|---|---|---|---|---|")
print("\n".join(rows))
for name, ms in layer_ms.items():
    if name in LAYER_TE:
        print(f"\n{name}: forward and backward {ms:.2f} ms (a step without the optimizer); TransformerEngine alone, by the table, {LAYER_TE[name]}")
sys.exit(failed)
