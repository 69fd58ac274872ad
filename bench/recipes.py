"""Trains a Llama of 4 layers and d 256 (examples/llama-tiny-fp8.ron) on this repository's own text under
each recipe, and compares where the losses end.

python3 bench/recipes.py PLANC cpu|cuda [STEPS]: prints a line a recipe. Exit code 1 if bf16 learned too
little, a recipe is off, or a loss is no number. All recipes see the same weights and the same batches. One
rounding that differs sends a run its own way, so ends are means over several seeds; how far those of bf16
lie apart is printed."""
import json, pathlib, random, statistics, subprocess, sys, tempfile

planc, device = sys.argv[1:3]
steps = int(sys.argv[3]) if len(sys.argv) > 3 else 400
repo = pathlib.Path(__file__).resolve().parent.parent

# By how much a loss may differ from that of bf16 at the end.
RECIPES = {
    "Bf16": 0.0,
    "DelayedScaling()": 0.02,
    "Float8CurrentScaling()": 0.02,
    "Float8BlockScaling()": 0.02,
    "MXFP8BlockScaling()": 0.02,
    "NVFP4BlockScaling()": 0.05,
}
# Of its first loss, what bf16 must have come to.
LEARNED = 0.6
# Steps whose mean is a loss "at the end".
LAST = 20
# Of initial weights.
SEEDS = range(4)
# A multiple of 128, so that blocks along the tokens exist as well.
SEQUENCE, BATCH = 128, 16
# Three times as much learns faster, and lets seeds end 8 % apart.
LR = 1e-3
WARMUP = 20


def corpus(file):
    """Rows of the text's bytes in random order; in its own order a batch would be a single paragraph."""
    sources = [it for it in repo.rglob("*.rs") if "target" not in it.relative_to(repo).parts]
    files = sorted((repo / "docs").glob("*.md")) + sorted(sources)
    text = b"".join(it.read_bytes() for it in files)
    rows = [text[i : i + SEQUENCE + 1] for i in range(0, len(text) - SEQUENCE, SEQUENCE)]
    random.Random(0).shuffle(rows)
    shape = [len(rows), SEQUENCE + 1]
    tensor = {"dtype": "U8", "shape": shape, "data_offsets": [0, shape[0] * shape[1]]}
    header = json.dumps({"tokens": tensor}).encode()
    header += b" " * (-len(header) % 8)
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"".join(rows))
    return f"{len(text)} bytes of {len(files)} files"


def train(recipe, seed, data, metrics):
    """The losses of all steps, None where one is no number, or why there are none."""
    schedule = f"(lr: {LR}, warmup: {WARMUP}, decay: Cosine(until: {max(steps, WARMUP + 1)}, min: {LR / 10}))"
    command = [planc, "run", repo / "examples/llama-tiny-fp8.ron", "--mesh", "1", "--device", device, "--quiet"]
    command += ["--steps", str(steps), "--seed", str(seed), "--data", data, "--metrics", metrics]
    options = [f"recipe={recipe}", f"schedule={schedule}", f"sequence={SEQUENCE}", f"batch=Global({BATCH})"]
    command += [it for option in options for it in ("--set", option)]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode != 0:
        return " ".join(run.stderr.split())[:200]
    return [json.loads(it)["loss"] for it in open(metrics)]


failed = False
bf16 = None
with tempfile.TemporaryDirectory() as folder:
    data = pathlib.Path(folder, "corpus.safetensors")
    print(f"{steps} steps on {device} from each of {len(SEEDS)} seeds, {corpus(data)}\n")
    print("| recipe | first loss | last | lowest, highest of a seed | of its first | of bf16's last | allowed | not finite | |")
    print("|---|---|---|---|---|---|---|---|---|")
    for recipe, allowed in RECIPES.items():
        runs = [train(recipe, seed, data, pathlib.Path(folder, "metrics.jsonl")) for seed in SEEDS]
        error = next((it for it in runs if isinstance(it, str)), None)
        if error:
            print(f"| {recipe} | {error} | | | | | | | FAILED |", flush=True)
            failed = True
            continue
        broken = sum(it is None or abs(it) == float("inf") for run in runs for it in run)
        if broken:
            print(f"| {recipe} | | | | | | | {broken} | FAILED |", flush=True)
            failed = True
            continue
        first = statistics.mean(run[0] for run in runs)
        lasts = [statistics.mean(run[-LAST:]) for run in runs]
        last = statistics.mean(lasts)
        if recipe == "Bf16":
            bf16 = last
            ok = last < LEARNED * first
        else:
            ok = bf16 is not None and abs(last / bf16 - 1) <= allowed
        failed |= not ok
        to_bf16 = f"{last / bf16:.4f}" if bf16 else ""
        line = f"| {recipe} | {first:.4f} | {last:.4f} | {min(lasts):.4f}, {max(lasts):.4f} | {last / first:.3f} | {to_bf16} "
        print(line + f"| {allowed:.0%} | 0 | {'ok' if ok else 'FAILED'} |", flush=True)
sys.exit(failed)
