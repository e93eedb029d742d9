import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import fsdp_optim

if not dist.is_initialized():  # under torchrun
    dist.init_process_group()
torch.manual_seed(0)  # the same weights on all ranks
model = torch.nn.Sequential(torch.nn.Linear(8, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3))
for layer in (model[0], model[2], model):
    fully_shard(layer)
optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
model(torch.randn(4, 8)).sum().backward()
optim.step()
full = fsdp_optim.gather_full_optim_state_dict(model, optim, recipient_rank=None, key_by="name")  # on all ranks
