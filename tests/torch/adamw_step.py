"""Goes on training from a checkpoint in stock PyTorch, for one step with given gradients.

usage: adamw_step.py FOLDER GRADS.safetensors OUT.safetensors

A module with the checkpoint's parameter names and `torch.optim.AdamW` are filled through
`get_state_dict`, `dcp.load` and `set_state_dict`, so moments, step counts, and the hyperparameters of
every group come from the checkpoint. OUT gets the parameters after the step.
"""
import sys

import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from common import model_and_optimizer


def main(folder, grads, out):
    model, optim, _ = model_and_optimizer(folder)
    model_state, optim_state = get_state_dict(model, optim)
    state = {"model": model_state, "optim": optim_state}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
    grads = load_file(grads)
    # Each once, under one name if it is tied.
    params = dict(model.named_parameters())
    assert params.keys() == grads.keys(), params.keys() ^ grads.keys()
    for name, param in params.items():
        param.grad = grads[name]
    optim.step()
    save_file({name: param.detach() for name, param in params.items()}, out)


main(*sys.argv[1:])
