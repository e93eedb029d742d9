import torch
import torch.distributed as dist
from fairscale.nn import FullyShardedDataParallel

if not dist.is_initialized():  # under torchrun
    dist.init_process_group()
rank, path = dist.get_rank(), "optim.pt"
fsdp = FullyShardedDataParallel(torch.nn.Linear(5, 3))
optim = torch.optim.Adam(fsdp.parameters())
fsdp(torch.ones(2, 5)).sum().backward()
optim.step()
