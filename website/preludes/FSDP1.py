import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullOptimStateDictConfig, FullyShardedDataParallel, StateDictType

import fsdp_optim

FSDP = FullyShardedDataParallel
if not dist.is_initialized():  # under torchrun
    dist.init_process_group()
rank, path = dist.get_rank(), "optim.pt"
torch.manual_seed(0)  # the same weights on all ranks
inner = torch.nn.Sequential(torch.nn.Linear(8, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3))
model = FSDP(inner, device_id=torch.device("cpu"))
optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
model(torch.randn(4, 8)).sum().backward()
optim.step()
