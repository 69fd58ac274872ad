"""Loads a checkpoint into a real FSDP2 job: `fully_shard`, `get_state_dict`, `dcp.load`, `set_state_dict`.

usage: fsdp_load.py FOLDER --ranks 2 [--out OUT.safetensors] [--save FOLDER]
{"tensors": {key: {dtype, shape, sha256}}, "param_groups": [{lr, betas, .., params: names}], "tied": {alias: name}}

The keys that PyTorch has for this model and AdamW must be exactly the checkpoint's below `model.` and
`optim.`: one too few or too many is an error. What is printed is read back from the module and the optimizer, and so is
what `--save` writes with `dcp.save`.
"""
import argparse
import json

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._state_dict_utils import _gather_state_dict
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from common import model_and_optimizer, on_ranks, report, tensors_of


def shard(model):
    # As in a training script: blocks of a list of layers first, then the rest.
    for name, module in model.named_modules():
        if name.rpartition(".")[2].isdigit():
            fully_shard(module)
    fully_shard(model)


def load(folder, out, save):
    model, optim, tied = model_and_optimizer(folder, shard)
    model_state, optim_state = get_state_dict(model, optim)
    state = {"model": model_state, "optim": optim_state}
    tensors, objects = tensors_of(folder)
    theirs = set(flatten_state_dict(state)[0])
    ours = {it for it in [*tensors, *objects] if it.startswith(("model.", "optim."))}
    assert theirs == ours, f"only PyTorch has {sorted(theirs - ours)}, only the checkpoint {sorted(ours - theirs)}"
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])

    model_state, optim_state = get_state_dict(model, optim)
    state = {"model": model_state, "optim": optim_state}
    if save:
        dcp.save(state, checkpoint_id=save)
    flat = flatten_state_dict(_gather_state_dict(state))[0]
    if dist.get_rank() == 0:
        print(json.dumps({
            "tensors": report({key: it for key, it in flat.items() if key in tensors}, out),
            "param_groups": optim_state["param_groups"],
            "tied": tied,
        }), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--out")
    parser.add_argument("--save")
    args = parser.parse_args()
    on_ranks(args.ranks, load, args.folder, args.out, args.save)
