"""`dcp.save` or `dcp.load` of the tensors of a checkpoint, each Shard(0) over 2 gloo processes; prints seconds.

usage: dcp.py save LIKE OUT | dcp.py load LIKE FOLDER

LIKE is a checkpoint that says which tensors there are; FOLDER is one that `save` made. Timed is the call
alone, from when the last rank begins to when the last ends. A small save and load come before, so that nothing is
done there for the first time. fsync is PyTorch's default.
"""
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "../../tests/torch"))
from common import on_ranks, tensors_of

RANKS = 2


def state_like(folder, mesh):
    state = {}
    for key, it in tensors_of(folder)[0].items():
        # Without counters and the like: the bulk is what is measured.
        if not it.size:
            continue
        local = list(it.size)
        local[0] = len(range(it.size[0])[dist.get_rank() * -(-it.size[0] // RANKS):][:-(-it.size[0] // RANKS)])
        data = torch.empty(local, dtype=it.properties.dtype)
        data.view(-1).view(torch.uint8).random_()
        stride = torch.empty(it.size, device="meta").stride()
        state[key] = DTensor.from_local(data, mesh, [Shard(0)], shape=it.size, stride=stride, run_check=False)
    return state


def timed(work):
    dist.barrier()
    start = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - start


def main(what, like, folder):
    torch.manual_seed(dist.get_rank())
    mesh = init_device_mesh("cpu", (RANKS,))
    state = state_like(like, mesh)
    small = {"small": DTensor.from_local(torch.zeros(8, 8), mesh, [Shard(0)], run_check=False)}
    dcp.save(small, checkpoint_id=f"{folder}.small")
    dcp.load(small, checkpoint_id=f"{folder}.small")
    call = {"save": dcp.save, "load": dcp.load}[what]
    seconds = timed(lambda: call(state, checkpoint_id=folder))
    if dist.get_rank() == 0:
        print(seconds, flush=True)


if __name__ == "__main__":
    on_ranks(RANKS, main, *sys.argv[1:])
