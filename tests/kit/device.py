"""A stand-in for a GPU: tensors that claim to be on another device, and refuse to be read as host memory.

Their elements are in ordinary memory, which torch's functions may use; `numpy()`, `data_ptr()`, `tolist()`, pickling and the
like, and functions of tensors on both sides, raise as they do where the memory is another one. So a `.cpu()` or a
`.to(device)` that was forgotten fails on a machine without a GPU.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

DEVICE = torch.device("privateuseone", 0)
CPU = torch.device("cpu")

_Tensor = torch.Tensor
_READS = {_Tensor.numpy, _Tensor.data_ptr, _Tensor.tolist, _Tensor.__array__, _Tensor.__reduce_ex__, _Tensor.__dlpack__}
_READS |= {_Tensor.storage, _Tensor.share_memory_, _Tensor.pin_memory}
_CROSSES = {_Tensor.copy_, _Tensor.__setitem__, torch._foreach_copy_, _Tensor.type_as}
_DEVICE, _IS_CPU, _IS_CUDA = _Tensor.device.__get__, _Tensor.is_cpu.__get__, _Tensor.is_cuda.__get__
_CASTS = {_Tensor.to, _Tensor.cpu, _Tensor.cuda}


class OnHost(RuntimeError):
    """Device memory was read as host memory, or was used with host memory in one function."""


class Place(torch.UntypedStorage):
    """All that the host may ask the storage of a device's tensor: where it is."""

    place: int

    @classmethod
    def of(cls, storage: torch.UntypedStorage) -> Place:
        made = cls(0)
        made.place = storage.data_ptr()
        return made

    def data_ptr(self) -> int:
        return self.place

    def _refuse(self, *_: object) -> Any:
        raise OnHost("the storage of a tensor that is not in the host's memory was read")

    tolist = cpu = clone = nbytes = __getitem__ = __reduce__ = _write_file = _refuse  # type: ignore[assignment]


class Device(TorchFunctionMode):
    """A context in which `DEVICE` is a device on this thread. Threads that share tensors must share one context.

    `num_copied`: the number of tensors that were copied from the device to the host. `numel_made`: the number of elements that
    this thread has allocated on the device, copies to the device included.
    """

    def __init__(self) -> None:
        super().__init__()
        self._mine: dict[int, StorageWeakRef] = {}
        self.num_copied = 0
        self._numel_made: Counter[int] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = list(_tensors((args, kwargs)))
        on_device = [tensor for tensor in tensors if self.has(tensor)]
        if func == _DEVICE:
            return DEVICE if on_device else func(*args)
        if func in (_IS_CPU, _IS_CUDA):
            return func == _IS_CPU and not on_device
        if on_device and func in _READS:
            raise OnHost(f"{getattr(func, '__name__', func)} of a tensor that is not in the host's memory")
        if on_device and func == _Tensor.untyped_storage:
            return Place.of(func(*args))
        target = DEVICE if on_device else CPU
        if func in _CASTS:
            return self._cast(func, args, kwargs, is_mine=bool(on_device))
        if kwargs.get("device") is not None:
            target = torch.device(kwargs["device"])
            kwargs["device"] = CPU if target.type == DEVICE.type else target
        elif any(tensor.dim() and not self.has(tensor) for tensor in tensors) and on_device and func not in _CROSSES:
            raise OnHost(f"{getattr(func, '__name__', func)} of tensors on {DEVICE} and on the host")
        made = func(*args, **kwargs)
        if target.type == DEVICE.type and func not in _CROSSES:
            known = {tensor.untyped_storage()._cdata for tensor in tensors}
            self._adopt(tensor for tensor in _tensors(made) if tensor.untyped_storage()._cdata not in known)
        return made

    @property
    def numel_made(self) -> int:
        return self._numel_made[threading.get_ident()]

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on the device."""
        with torch._C.DisableTorchFunction():
            reference = self._mine.get(tensor.untyped_storage()._cdata)
        return reference is not None and not reference.expired()

    def _adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._numel_made[threading.get_ident()] += tensor.numel()
            self._mine[storage._cdata] = StorageWeakRef(storage)

    def _cast(self, func: Any, args: Any, kwargs: dict[str, Any], *, is_mine: bool) -> torch.Tensor:
        """The functions like `to`, which copy a tensor to another device or dtype."""
        source, *rest = args
        where = [
            torch.device(argument)
            for argument in (*rest, kwargs.get("device"))
            if isinstance(argument, (str, torch.device))
        ]
        like = [DEVICE if self.has(argument) else CPU for argument in rest if isinstance(argument, torch.Tensor)]
        here = DEVICE if is_mine else CPU
        target = CPU if func is _Tensor.cpu else (*where, *like, here)[0]
        if target.type == DEVICE.type:
            rest = [CPU if isinstance(argument, (str, torch.device)) else argument for argument in rest]
            kwargs |= {"device": CPU} if "device" in kwargs else {}
        made = func(source, *rest, **kwargs)
        if target.type != here.type and made.untyped_storage()._cdata == source.untyped_storage()._cdata:
            made = made.clone()
        self.num_copied += is_mine and target.type == "cpu"
        if target.type == DEVICE.type:
            self._adopt([made])
        return made


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for member in value:
            yield from _tensors(member)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
