"""A local tensor describes its shards by methods, which its class has, or which a program gave to the tensor itself."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from fsdp_optim.adapters.checkpointable import describes_itself
from fsdp_optim.testing import run_on_ranks

METHODS = ("__create_chunk_list__", "__get_tensor_shard__")


def described(methods: tuple[str, ...]) -> bool:
    mesh = init_device_mesh("cpu", (1,))
    value = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)], run_check=False)
    for name in methods:
        setattr(value._local_tensor, name, lambda *args: [])
    return describes_itself(value)


def test_methods_of_the_tensor_itself() -> None:
    assert run_on_ranks(described, 1, METHODS) == [True]


def test_a_tensor_with_other_attributes() -> None:
    assert run_on_ranks(described, 1, METHODS[:1]) == [False]


def test_a_tensor_without_any() -> None:
    assert run_on_ranks(described, 1, ()) == [False]
