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
adamw = torch.optim.AdamW(model.parameters())
model(torch.randn(4, 8)).sum().backward()
adamw.step()
full_of_adamw = fsdp_optim.gather_full_optim_state_dict(model, adamw, recipient_rank=None, key_by="name")
adam = torch.optim.Adam(model.parameters())
adam.step()
