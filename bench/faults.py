"""What goes wrong on GPUs must end with a clear error on every rank, soon, with nothing lost.

python3 bench/faults.py PLANC GPUS: prints a line a fault; exit code 1 if one is not met."""
import json, os, signal, socket, struct, subprocess, sys, tempfile, time

planc, gpus = sys.argv[1], int(sys.argv[2])
here = os.path.dirname(os.path.abspath(__file__))
model = os.path.join(here, "../examples/llama-tiny.ron")
folder = tempfile.mkdtemp()
failed = False


def free_port():
    with socket.socket() as it:
        it.bind(("127.0.0.1", 0))
        return it.getsockname()[1]


def start(args, rank=None, world=2, port=None, env=()):
    variables = dict(os.environ, **dict(env))
    if rank is not None:
        variables.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    command = [planc, "run", model, "--device", "cuda"] + args
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables)


def end(processes, seconds):
    """Exit codes and stderr of all, or what hung."""
    res, limit = [], time.time() + seconds
    for it in processes:
        try:
            out, error = it.communicate(timeout=max(0.1, limit - time.time()))
            res.append((it.returncode, " ".join(error.split()), out))
        except subprocess.TimeoutExpired:
            stacks = ["cuda-gdb", "-p", str(it.pid), "-batch", "-ex", "thread apply all bt 14"]
            subprocess.run(stacks, stdout=sys.stderr, stderr=subprocess.STDOUT, timeout=90)
            it.kill()
            it.communicate()
            res.append(("HANGS", "", ""))
    return res


def check(name, results, words, code=1):
    global failed
    ok = all(c == code and all(w in e for w in words) for c, e, _ in results)
    failed |= not ok
    print(f"| {name} | {'ok' if ok else 'FAILED'} | {results[0][0]} | {results[-1][1][:400]} |", flush=True)


def wait_for_step(process, steps=3):
    """Reads the output up to a step, so that the run is under way."""
    for line in process.stdout:
        if line.startswith(f"step: {steps:>3}"):
            return


print("| fault | | exit code | what the last rank said |\n|---|---|---|---|")
mesh = "2" if gpus > 1 else "1"
bad = os.path.join(folder, "bad.bin")
with open(bad, "wb") as it:
    it.write(struct.pack("<H", 9999) * 100000)
check("token id beyond the vocabulary", end([start(["--mesh", mesh, "--data", bad, "--token-type", "u16"])], 60), ["9999", "vocabulary"])
full = end([start(["--mesh", mesh, "--steps", "3", "--metrics", "/dev/full"])], 60)
check("full disk under --metrics: warns and goes on", full, ["/dev/full"], code=0)
NAN = ["--mesh", mesh, "--steps", "8", "--set", "schedule=(lr: 1e30)"]
check("steps that are not finite: skipped, with a warning", end([start(NAN)], 60), ["is not finite"], code=0)
check("more than three of them in a row", end([start(NAN + ["--max-nonfinite", "3"])], 60), ["PL0517"])
check("more ranks than GPUs", end([start(["--mesh", str(2 * gpus)])], 60), ["GPU"])
if gpus > 1:
    long = ["--mesh", "2", "--steps", "1000000"]
    port = free_port()
    ranks = [start(long, rank, port=port) for rank in range(2)]
    wait_for_step(ranks[0])
    began = time.time()
    ranks[1].kill()
    results = end(ranks[:1], 60)
    check(f"a killed process ({time.time() - began:.1f} s later)", results, ["rank 1"])
    ranks[1].communicate()

    port = free_port()
    ranks = [start(long, rank, port=port, env={"PLANC_TIMEOUT_S": "5"}) for rank in range(2)]
    wait_for_step(ranks[0])
    began = time.time()
    ranks[1].send_signal(signal.SIGSTOP)
    results = end(ranks[:1], 90)
    check(f"a stopped process ({time.time() - began:.1f} s later)", results, ["rank"])
    ranks[1].kill()
    ranks[1].communicate()

    port = free_port()
    first = start(long, 0, port=port)
    time.sleep(2)
    second = end([start(long, 0, port=port)], 60)
    check("a second job on the port", second, [str(port)])
    other = start(["--mesh", "2", "--steps", "10", "--seed", "5", "--set", "sequence=16"], 1, port=port)
    check("another plan on rank 1", end([first, other], 60), ["plan"])
    torchrun = subprocess.run(
        ["torchrun", "--no-python", "--nproc_per_node", "2", planc, "run", model, "--mesh", "2", "--device", "cuda", "--steps", "5"],
        capture_output=True, text=True, timeout=120,
    )
    ok = torchrun.returncode == 0 and "step:   5" in torchrun.stdout and torchrun.stdout.count("step:   5") == 1
    failed |= not ok
    print(f"| (torchrun, no fault) | {'ok' if ok else 'FAILED'} | {torchrun.returncode} | {torchrun.stdout.strip().splitlines()[-1:]} {'' if ok else torchrun.stderr[-800:]} |")
sys.exit(failed)
