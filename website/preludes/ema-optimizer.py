import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard


class Average(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})
        for param in self.param_groups[0]["params"]:
            self.state[param]["ema_params"] = param.detach().clone()

    def step(self, closure=None):
        raise RuntimeError("call update()")


if not dist.is_initialized():  # under torchrun
    dist.init_process_group()
torch.manual_seed(0)  # the same weights on all ranks
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
fully_shard(model)
ema = Average(model.parameters())
