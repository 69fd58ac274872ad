"""Reads a whole checkpoint with stock `dcp.load` in one process, and prints it as JSON.

usage: load_plain.py FOLDER [OUT.safetensors]
{"tensors": {key: {dtype, shape, sha256}}, "objects": {key: repr}, "nested": [top-level keys]};
the tensors themselves go to OUT

The targets are plain tensors of the sizes and types that `.metadata` gives, full of junk. Then it is
read again into no target at all, as `dcp_to_torch_save` does, by which PyTorch rebuilds nested
dictionaries from `planner_data`; both must agree.
"""
import json
import sys

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from common import digest, junk, report, tensors_of


def main(folder, out=None):
    tensors, objects = tensors_of(folder)
    state = {key: junk(it.size, it.properties.dtype) for key, it in tensors.items()}
    state.update({key: None for key in objects})
    dcp.load(state, checkpoint_id=folder, no_dist=True)

    nested = {}
    reader = dcp.FileSystemReader(folder)
    _load_state_dict(nested, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    for key, path in reader.read_metadata().planner_data.items():
        value = nested
        for part in path:
            value = value[part]
        if key in tensors:
            assert digest(value) == digest(state[key]), f"{key} is not the same in a nested dictionary"
        else:
            assert repr(value) == repr(state[key]), f"{key} is not the same in a nested dictionary"

    print(json.dumps({
        "tensors": report({key: state[key] for key in tensors}, out),
        "objects": {key: repr(state[key]) for key in objects},
        "nested": sorted(nested),
    }))


main(*sys.argv[1:])
