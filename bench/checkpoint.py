"""Times planc's save and load of 1 GiB of f32 state beside PyTorch's and beside one large sequential file.

usage: bench/checkpoint.py FOLDER [ROUNDS]        FOLDER is made, on the disk to measure, and removed

Two ranks on both sides, of the same tensors; fsync on all sides; files are dropped from the page cache before they are
loaded, and are in it when they are loaded again. Rounds alternate, each side being first in turn, since disks of shared machines are fast at one minute and
slow at another: medians and the best are printed. Then the planning of 900 tensors on 1024 ranks, and PyTorch reading what that made.
"""
import os
import shutil
import statistics
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
REPO = os.path.dirname(HERE)
BLOCK = 64 << 20


def output(*command):
    res = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if res.returncode != 0:
        sys.exit(f"{' '.join(command)}:\n{res.stdout}{res.stderr[-3000:]}")
    return res.stdout.strip()


def files(folder):
    return [os.path.join(at, it) for at, _, names in os.walk(folder) for it in names]


def evict(folder):
    os.sync()
    for path in files(folder):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def sequential_write(path, content):
    start = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    done = 0
    while done < len(content):
        done += os.write(fd, content[done : done + BLOCK])
    os.fsync(fd)
    os.close(fd)
    return time.perf_counter() - start


def sequential_read(path, content):
    start = time.perf_counter()
    fd = os.open(path, os.O_RDONLY)
    done = 0
    while done < len(content):
        done += os.readv(fd, [content[done : done + BLOCK]])
    os.close(fd)
    return time.perf_counter() - start


def measure(planc, python, root, rounds):
    peer = os.path.join(HERE, "peers/dcp.py")
    ours, theirs, raw = (os.path.join(root, it) for it in ["planc", "torch", "raw"])
    like = os.path.join(root, "like")
    output(planc, "save", like)
    seconds = {}
    content = memoryview(bytearray(os.urandom(sum(map(os.path.getsize, files(like))))))
    save = {
        "planc": lambda: float(output(planc, "save", ours)),
        "torch": lambda: float(output(python, peer, "save", like + "/step-1", theirs)),
        "raw": lambda: sequential_write(raw, content),
    }
    load = {
        "planc": lambda: float(output(planc, "load", ours)),
        "torch": lambda: float(output(python, peer, "load", like + "/step-1", theirs)),
        "raw": lambda: sequential_read(raw, content),
    }
    for round in range(rounds + 1):
        for path in [ours, theirs, theirs + ".small"]:
            shutil.rmtree(path, ignore_errors=True)
        if os.path.exists(raw):
            os.remove(raw)
        # Each is first in turn.
        order = [list(save)[(round + i) % 3] for i in range(3)]
        one = {}
        for what, calls in [("save", save), ("load", load), ("load again", load)]:
            for who in order:
                if what != "load again":
                    evict(root)
                one[f"{who} {what}"] = calls[who]()
        print(f"round {round}:", ", ".join(f"{what} {it:.2f} s" for what, it in one.items()), flush=True)
        # The first has cold programs.
        if round > 0:
            for what, it in one.items():
                seconds.setdefault(what, []).append(it)
    return len(content), seconds


def table(n_bytes, seconds):
    print(f"\n{n_bytes / 2**30:.3f} GiB, medians of {len(seconds['planc save'])}, best in brackets\n")
    print("| | planc s | PyTorch s | one file s | planc GB/s | PyTorch GB/s | one file GB/s | PyTorch / planc | one file / planc |")
    print("|---|---|---|---|---|---|---|---|---|")
    for what in ["save", "load", "load again"]:
        times = [seconds[f"{who} {what}"] for who in ["planc", "torch", "raw"]]
        medians = [statistics.median(it) for it in times]
        cells = [f"{m:.2f} ({min(it):.2f})" for m, it in zip(medians, times)]
        cells += [f"{n_bytes / it / 1e9:.2f}" for it in medians]
        cells += [f"{medians[1] / medians[0]:.2f}", f"{medians[2] / medians[0]:.2f}"]
        print("|", what, "|", " | ".join(cells), "|")


def planning(planc, python, root):
    print("\n" + output(planc, "plan", os.path.join(root, "plan")))
    script = """
import pickle, sys, time
start = time.perf_counter()
metadata = pickle.load(open(sys.argv[1], "rb"))
seconds = time.perf_counter() - start
chunks = sum(len(getattr(it, "chunks", [])) for it in metadata.state_dict_metadata.values())
print(f"PyTorch unpickles it in {seconds:.1f} s: {len(metadata.state_dict_metadata)} keys, {chunks} chunks, {len(metadata.storage_data)} items")
"""
    print(output(python, "-c", "import torch.distributed.checkpoint\n" + script, os.path.join(root, "plan/.metadata")))


def main(root, rounds=5):
    build = ["cargo", "build", "--release", "--quiet", "-p", "bench", "--bin", "checkpoint-speed"]
    subprocess.run(build, cwd=REPO, check=True)
    target = os.environ.get("CARGO_TARGET_DIR", os.path.join(REPO, "target"))
    planc = os.path.join(target, "release/checkpoint-speed")
    python = output(os.path.join(REPO, "tests/torch.sh"))
    os.makedirs(root)
    try:
        table(*measure(planc, python, root, int(rounds)))
        planning(planc, python, root)
    finally:
        shutil.rmtree(root)


main(*sys.argv[1:])
