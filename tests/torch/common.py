"""What the scripts of this folder share: digests, gloo processes, and a module with given parameters."""
import hashlib
import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata


def tensors_of(folder):
    """The tensors of a checkpoint by key, as its `.metadata` describes them; and the keys of its objects."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    entries = metadata.state_dict_metadata
    tensors = {key: it for key, it in entries.items() if isinstance(it, TensorStorageMetadata)}
    return tensors, [key for key in entries if key not in tensors]


def junk(size, dtype):
    """A tensor of which every byte is 0xA5: what a load leaves out is not zero by luck."""
    res = torch.empty(size, dtype=dtype)
    as_bytes(res).fill_(0xA5)
    return res


def as_bytes(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


def digest(tensor):
    """What is compared: dtype, shape, and SHA-256 of the row-major little-endian bytes."""
    content = as_bytes(tensor.detach()).numpy().tobytes()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": list(tensor.shape), "sha256": hashlib.sha256(content).hexdigest()}


def report(tensors, out):
    """Digests by key; and the tensors themselves in a safetensors file, if `out` names one."""
    if out:
        save_file({key: it.detach().clone().contiguous() for key, it in tensors.items()}, out)
    return {key: digest(it) for key, it in tensors.items()}


def _run_rank(rank, n_ranks, store, work, args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=n_ranks)
    work(*args)
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(n_ranks, work, *args):
    """Calls `work(*args)` in each of `n_ranks` gloo processes of this machine. One that fails fails all."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        args = (n_ranks, f"{folder}/store", work, args)
        # Forked, since each import of torch takes seconds.
        torch.multiprocessing.start_processes(_run_rank, args, n_ranks, start_method="fork")


def module_of(shapes, tied):
    """A module whose parameters have the names and sizes of `shapes`, all zero; `tied` gives aliases
    the name that they are another name of."""
    root = nn.Module()

    def parent(name):
        *path, last = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module._modules[part]
        return module, last

    for name, shape in shapes.items():
        if name not in tied:
            module, last = parent(name)
            module.register_parameter(last, nn.Parameter(torch.zeros(shape)))
    for alias, name in tied.items():
        module, last = parent(alias)
        module.register_parameter(last, root.get_parameter(name))
    return root


def model_and_optimizer(folder, shard=None):
    """A module and an AdamW as a checkpoint's keys say, before anything is loaded: parameters are zero,
    and the hyperparameters are ones that nobody uses. `shard(module)` may shard the module first.

    Two keys at the same bytes are tied.
    """
    tensors, _ = tensors_of(folder)
    prefix = "model."
    shapes = {key.removeprefix(prefix): it.size for key, it in tensors.items() if key.startswith(prefix)}
    places = {}
    for index, it in dcp.FileSystemReader(folder).read_metadata().storage_data.items():
        name = index.fqn.removeprefix(prefix)
        if index.fqn.startswith(prefix) and shapes[name].numel():
            places.setdefault((it.relative_path, it.offset), []).append(name)
    has_state = lambda name: f"optim.state.{name}.exp_avg" in tensors
    tied = {}
    for names in places.values():
        first, *aliases = sorted(names, key=lambda it: not has_state(it))
        tied.update({it: first for it in aliases})
    model = module_of(shapes, tied)
    if shard:
        shard(model)
    groups = [{"params": [model.get_parameter(it) for it in names]} for names in param_groups(folder)]
    optim = torch.optim.AdamW(groups, lr=123.0, betas=(0.5, 0.5), eps=1.0, weight_decay=0.5)
    return model, optim, tied


def param_groups(folder):
    """The names of the parameters of each group of a checkpoint's optimizer."""
    _, objects = tensors_of(folder)
    groups = {key: None for key in objects if key.startswith("optim.param_groups.") and key.endswith(".params")}
    dcp.load(groups, checkpoint_id=folder, no_dist=not dist.is_initialized())
    return [groups[f"optim.param_groups.{i}.params"] for i in range(len(groups))]
