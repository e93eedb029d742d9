"""All ranks add up their numbers over gloo, and each says who it is and what it has got."""

from __future__ import annotations

import os
import socket

import torch
import torch.distributed as dist

if __name__ == "__main__":
    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total)
    print(
        f"rank {dist.get_rank()} of {dist.get_world_size()} on {socket.gethostname()}, pid {os.getpid()}: {total.item()}"
    )
    dist.destroy_process_group()
