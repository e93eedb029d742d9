import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

if not dist.is_initialized():  # under torchrun
    dist.init_process_group()
torch.manual_seed(0)  # the same weights on all ranks
model = torch.nn.Sequential(torch.nn.Linear(8, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3))
for layer in (model[0], model[2], model):
    fully_shard(layer)
optim_a = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
optim_b = torch.optim.Adam(model[2].parameters())
model(torch.randn(4, 8)).sum().backward()
optim_a.step()
optim_b.step()
