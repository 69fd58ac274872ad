"""Reads a whole checkpoint with stock `dcp.load` into DTensors on a mesh of gloo processes, gathers
them with `full_tensor`, and prints JSON: {"tensors": {key: {dtype, shape, sha256}}}; the tensors themselves go to OUT.

usage: load_dtensor.py FOLDER --mesh 2x2 --place 'GLOB=P,P' ... [--out OUT.safetensors]

P is R (Replicate), S0 (Shard(0)) or SS0/2 (_StridedShard(0, split_factor=2)); one for each mesh axis. The
first GLOB that fits a key counts; a key that none fits is replicated, and so is a placement of a
dimension that the tensor does not have.
"""
import argparse
import fnmatch
import json
import math

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from common import junk, on_ranks, report, tensors_of


def placement(text, ndim):
    if text == "R":
        return Replicate()
    dim, _, split_factor = text.lstrip("S").partition("/")
    if int(dim) >= ndim:
        return Replicate()
    return _StridedShard(int(dim), split_factor=int(split_factor)) if split_factor else Shard(int(dim))


def full(tensor):
    # gloo does not know 8-bit floats: gather their bytes.
    if tensor.dtype.itemsize == 1:
        local = tensor.to_local().view(torch.uint8)
        args = {"shape": tensor.shape, "stride": tensor.stride(), "run_check": False}
        codes = DTensor.from_local(local, tensor.device_mesh, tensor.placements, **args)
        return codes.full_tensor().view(tensor.dtype)
    return tensor.full_tensor()


def load(folder, mesh_shape, rules, out):
    mesh = init_device_mesh("cpu", mesh_shape)
    tensors, _ = tensors_of(folder)
    state = {}
    for key, it in tensors.items():
        texts = next((places for glob, places in rules if fnmatch.fnmatch(key, glob)), ["R"] * len(mesh_shape))
        places = [placement(text, len(it.size)) for text in texts]
        # No data is sent: every rank cuts its own junk.
        state[key] = distribute_tensor(junk(it.size, it.properties.dtype), mesh, places, src_data_rank=None)
    dcp.load(state, checkpoint_id=folder)
    tensors = {key: full(it) for key, it in state.items()}
    if dist.get_rank() == 0:
        print(json.dumps({"tensors": report(tensors, out)}), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--mesh", required=True)
    parser.add_argument("--place", action="append", default=[])
    parser.add_argument("--out")
    args = parser.parse_args()
    mesh_shape = tuple(int(it) for it in args.mesh.split("x"))
    rules = [(glob, places.split(",")) for glob, places in (it.split("=") for it in args.place)]
    on_ranks(math.prod(mesh_shape), load, args.folder, mesh_shape, rules, args.out)
