"""PyTorch's tests for GPUs, on the CPU with gloo: the text of a test file, and what its processes ask of torch."""

from __future__ import annotations

import functools
import re
from typing import Any

_WORDS = (
    (r"^ *@(skip_if_lt_x_gpu|requires_nccl|requires_accelerator\w*|skip_unless_torch_gpu)\b.*\n", ""),
    (r"torch\.(cuda|accelerator)\.device_count\(\)", "NUM_RANKS"),
    (r"\.cuda\([^()]*\)", ""),
    (r'"cpu:gloo,cuda:nccl"|"cuda:nccl,cpu:gloo"|"nccl"', '"gloo"'),
    (r"torch\.cuda\.set_device\([^()]*(\([^()]*\))?\)", "None"),
    (r"device=(self\.rank|dist\.get_rank\(\))", 'device="cpu"'),
    (r"/cuda:(\d|\{[^{}]*\})", "/cpu"),
    (r'f"cuda:\{[^{}]*\}"|"cuda(:\d)?"', '"cpu"'),
    (r"'cuda'", "'cpu'"),
    (r'"/tmp/(\w+)"', r'__import__("tempfile").gettempdir() + "/\1"'),
)


def on_the_cpu(text: str, num_ranks: int) -> str:
    """Return a test file for the CPU, which asks `prepare` when it is imported."""
    for pattern, replacement in _WORDS:
        text = re.sub(pattern, replacement.replace("NUM_RANKS", str(num_ranks)), text, flags=re.MULTILINE)
    first = "from conformance.on_the_cpu import let_run as _let_run; _let_run()\n"
    last = "\nfrom conformance.replaced import replace_names as _replace_names\n\n_replace_names(globals())\n\n\n"
    body, main, rest = text.partition('if __name__ == "__main__":')
    return first + body + last + main + rest


def let_run() -> None:
    """Let tests of this process run on the CPU, as many ranks as they ask for, each forked from it."""
    import torch
    import torch.multiprocessing
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.testing._internal.common_distributed import MultiProcessTestCase
    from torch.testing._internal.distributed._shard import sharded_tensor

    def forked(case: Any) -> None:
        case._start_processes(torch.multiprocessing.get_context("fork").Process)

    made: Any = FullyShardedDataParallel.__init__

    def on_cpu(unit: Any, *args: Any, **kwargs: Any) -> None:
        """FSDP1 asks for an accelerator, unless it is given a device."""
        made(unit, *args, **{"device_id": torch.device("cpu"), **kwargs})

    asked: Any = sharded_tensor.with_comms

    def with_comms(test: Any = None, init_rpc: bool = True, backend: str = "gloo") -> Any:
        return functools.partial(with_comms, init_rpc=init_rpc) if test is None else asked(test, init_rpc, backend)

    for owner, name, new in (
        (MultiProcessTestCase, "_spawn_processes", forked),
        (FullyShardedDataParallel, "__init__", on_cpu),
        (torch.accelerator, "device_count", lambda: 64),
        (sharded_tensor, "with_comms", with_comms),
    ):
        setattr(owner, name, new)
