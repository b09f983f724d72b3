"""Distributed setup: one process, or several under torchrun with FSDP2, behind the same functions."""

import os
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rollmesh.errors import ConfigError

_ORDER_TIMEOUT = timedelta(days=1)
"""Limit of the wait for the next message of rank 0, which may wait for Redis, a full disk or an object store meanwhile.
A rank that dies closes its connections, which ends the wait of its peers at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The trainer processes that share one model."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    orders: dist.ProcessGroup | None = None
    """Group of the messages of rank 0; None with one process."""

    @property
    def leads(self) -> bool:
        """True on rank 0, which claims, commits and publishes."""
        return self.rank == 0


def join_world(device_type: str) -> World:
    """Join the process group of torchrun's environment: gloo for ``cpu``, nccl for ``cuda``. One process joins none."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return World()
    dist.init_process_group("gloo" if device_type == "cpu" else "cpu:gloo,cuda:nccl")
    orders = dist.new_group(backend="gloo", timeout=_ORDER_TIMEOUT)
    return World(rank=dist.get_rank(), size=size, local_rank=local_rank(), orders=orders)


def local_rank() -> int:
    """Return the rank of this process on its node."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def leave_world() -> None:
    """Destroy the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def pick_device(choice: str, local_rank: int = 0) -> torch.device:
    """Select a device: ``auto`` selects CUDA if it is available. Each local rank uses a GPU with its own index.

    Raises ConfigError if CUDA is absent.
    """
    if choice == "cpu" or (choice == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(f"device={choice}: this machine or this build of torch has no CUDA; set cpu or auto")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def shard(model: nn.Module, causal_lm: PreTrainedModel, world: World, *, mixed: bool) -> None:
    """Shard the parameters over the ranks with FSDP2: each decoder layer, then the rest with the root.

    ``mixed`` gathers and computes in bfloat16. Gradients are summed in float32 for every compute dtype. No-op with one
    process.
    """
    if world.size == 1:
        return
    half, full = torch.bfloat16, torch.float32
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=full) if mixed else MixedPrecisionPolicy()
    layers = set(causal_lm._no_split_modules or ())
    for module in causal_lm.modules():
        if type(module).__name__ in layers:
            fully_shard(module, mp_policy=policy)
    # The root takes token ids and temperatures. bfloat16 would change a temperature by up to 0.4%.
    policy = replace(policy, cast_forward_inputs=False)
    # By default the root keeps its parameters gathered after a forward pass; they are read between passes.
    fully_shard(model, mp_policy=policy, reshard_after_forward=True)


def gathered(tensor: Tensor) -> Tensor:
    """Return the full tensor on its device: a copy if it is sharded, else the tensor. Every rank must call it."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def local_part(tensor: Tensor) -> Tensor:
    """Return the shard of this rank, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def zeros_on_host(like: Tensor) -> Tensor:
    """Return zeros of this shape and dtype in host memory, in the same shards; pinned beside a GPU."""
    zeros = torch.zeros_like(local_part(like.detach()), device="cpu", pin_memory=like.is_cuda)
    if not isinstance(like, DTensor):
        return zeros
    mesh = like.device_mesh if like.device_mesh.device_type == "cpu" else _host_mesh(like.device_mesh.size())
    return DTensor.from_local(zeros, mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())


@cache
def _host_mesh(size: int) -> DeviceMesh:
    """Return a mesh of all ranks, whose process group is made once."""
    return init_device_mesh("cpu", (size,))


def sum_over_ranks(tensor: Tensor, world: World) -> Tensor:
    """Sum a CPU tensor over the ranks in place."""
    if world.size > 1:
        dist.all_reduce(tensor)
    return tensor


def broadcast_bytes(data: bytes | None, world: World) -> bytes:
    """Broadcast ``data`` of rank 0, at least one byte, to every rank; the other ranks pass None."""
    if world.size == 1:
        assert data is not None
        return data
    length = torch.tensor([len(data or b"")], dtype=torch.int64)
    dist.broadcast(length, 0, group=world.orders)
    buffer = torch.frombuffer(bytearray(data or bytes(int(length))), dtype=torch.uint8)
    dist.broadcast(buffer, 0, group=world.orders)
    return buffer.numpy().tobytes()
