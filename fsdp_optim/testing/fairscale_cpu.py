"""fairscale FSDP without CUDA."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from unittest import mock

import torch

from fsdp_optim.errors import missing

T = TypeVar("T")


def forget_fairscale_groups() -> None:
    """Empty fairscale's cache of process groups.

    The cache outlives `destroy_process_group`, and then hands out dead groups. Call this between two worlds
    of one process. Does nothing when fairscale is not loaded.
    """
    parallel = sys.modules.get("fairscale.internal.parallel")
    if parallel is not None and hasattr(parallel.get_process_group_cached, "_global_group_cache"):
        del parallel.get_process_group_cached._global_group_cache


class _CpuStream:
    """A stand-in for a CUDA stream, for a device that runs everything immediately and in order."""

    def wait_stream(self, stream: object) -> None:
        """Do nothing: there is nothing to wait for."""

    def synchronize(self) -> None:
        """Do nothing: there is nothing to wait for."""


class _CpuStreams:
    """Stand-ins for `torch.cuda.current_stream`, `stream` and `synchronize`."""

    def __init__(self) -> None:
        self._stack = [_CpuStream()]

    def current(self, device: object = None) -> _CpuStream:
        return self._stack[-1]

    @contextlib.contextmanager
    def use(self, stream: _CpuStream) -> Iterator[None]:
        self._stack.append(stream)
        try:
            yield
        finally:
            self._stack.pop()

    def synchronize(self, device: object = None) -> None:
        """Do nothing: there is nothing to wait for."""

    @classmethod
    def are_in_place(cls) -> bool:
        return isinstance(getattr(torch.cuda.current_stream, "__self__", None), cls)


@contextlib.contextmanager
def fairscale_on_cpu() -> Iterator[None]:
    """Let fairscale's `FullyShardedDataParallel` train over gloo on CPU.

    Build the model and use it inside the context. There:

    - `compute_device` defaults to the CPU, and gradients are reduced without buckets, whatever
      `bucket_cap_mb` says, because gloo refuses the bucketed form (the sums are the same);
    - `torch.cuda.current_stream`, `stream` and `synchronize`, `Tensor.record_stream` and `Tensor.pin_memory`
      do nothing, and so does `Tensor.cuda`, but only within `clip_grad_norm_`;
    - subclasses and `wrapper_cls` work as well, and so do all other arguments of the wrapper.

    Everything is put back on exit, also after an exception, and fairscale's cache of process groups is
    emptied on entering and leaving. Contexts may be nested: the outermost does the work. Where CUDA is
    available this changes nothing at all; elsewhere, entering without fairscale raises ModuleNotFoundError.
    The stand-ins belong to the process: do not enter from two threads at once.

    What fairscale itself cannot do, it cannot do here: `mixed_precision=True` turns float32 inputs into
    float16 even when `compute_dtype=torch.bfloat16`, so bfloat16 needs inputs that are integers or bfloat16
    already; and at world size 1 its gradients stay in the low precision unless `fp32_reduce_scatter` or
    `move_params_to_cpu` is set, which torch.optim refuses.
    """
    if torch.cuda.is_available() or _CpuStreams.are_in_place():
        yield
        return
    try:
        from fairscale.nn.data_parallel import fully_sharded_data_parallel as fsdp_module
    except ModuleNotFoundError as error:
        if error.name != "fairscale":  # fairscale is there, and something that it imports is not
            raise
        raise missing("fairscale_on_cpu()", "fairscale") from None

    streams = _CpuStreams()
    wrapper = fsdp_module.FullyShardedDataParallel
    cpu = torch.device("cpu")
    with contextlib.ExitStack() as stack:
        for target, name, stand_in in (
            (torch.cuda, "current_stream", streams.current),
            (torch.cuda, "stream", streams.use),
            (torch.cuda, "synchronize", streams.synchronize),
            (torch.Tensor, "record_stream", lambda tensor, stream: None),
            (torch.Tensor, "pin_memory", lambda tensor, device=None: tensor),
            (fsdp_module, "_get_default_cuda_device", lambda module: cpu),
            (wrapper, "_setup_streams", _with_cpu_streams(wrapper._setup_streams)),
            (wrapper, "clip_grad_norm_", _without_moving_to_cuda(wrapper.clip_grad_norm_)),
        ):
            stack.enter_context(mock.patch.object(target, name, stand_in))
        forget_fairscale_groups()
        stack.callback(forget_fairscale_groups)
        yield


def _with_cpu_streams(setup_streams: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(setup_streams)
    def setup(fsdp: Any) -> None:
        is_first_time = fsdp._is_root and not fsdp._streams
        setup_streams(fsdp)
        if is_first_time:  # the children share both objects by now
            for name in ("fp32_to_fp16", "all_gather", "post_backward"):
                fsdp._streams[name] = _CpuStream()
            fsdp._reducer.bucket_cap_mb = 0

    return setup


def _without_moving_to_cuda(method: Callable[..., T]) -> Callable[..., T]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> T:
        with mock.patch.object(torch.Tensor, "cuda", lambda tensor, *args, **kwargs: tensor):
            return method(*args, **kwargs)

    return call
