"""What hooks may not do while they are run on numbers: talk to other ranks, use live parameters, change the model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from fsdp_optim.adapters.state_dict_hooks import HookedUnit, contents_of
from fsdp_optim.tensors.dtensors import is_dtensor, local_of

_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem")
"""The namespaces of torch's collective operations."""


class Forbidden(Exception):
    """A hook was about to do what it may not; it has not been done."""


class Guard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode in which hooks are run. It knows the tensors that were made in it, and which of them come from numbers."""

    def __init__(self, live: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known: MutableMapping[torch.Tensor, bool] = WeakIdKeyDictionary()
        """By tensor, whether it has, or was computed from, numbers."""
        self._written: MutableMapping[torch.Tensor, bool] = WeakIdKeyDictionary()
        self.trace: list[tuple[str, tuple[object, ...]]] = []
        """The operations in their order, each with its arguments that are no tensors."""
        self.flow: list[tuple[str, ...]] = []
        """The same with all arguments, and the results: of a tensor, the number by which it was given or made."""
        self.is_closed = True
        """Whether the operations took nothing but what was given, and made: then `flow` says all that they do."""
        self._numbers: MutableMapping[torch.Tensor, int] = WeakIdKeyDictionary()
        self._count = itertools.count()  # a number is never given again, also after its tensor is freed
        self._live = {id(tensor): name for name, tensor in live.items()}
        self._memory = {at: name for name, tensor in live.items() if (at := _memory_of(tensor))}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, because torch would import its compiler, which takes a second, to keep it from compiling this mode."""
        return False

    def give(self, numbers: Sequence[torch.Tensor]) -> None:
        """Let the hooks have tensors of numbers."""
        for tensor in numbers:
            self._known[tensor] = True
            self.number(tensor)

    def number(self, value: object) -> str:
        """Return the number of a tensor, which it gets here if it has none, or the text of any other value."""
        if not isinstance(value, torch.Tensor):
            return f"{type(value).__name__} {value!r}"
        if value not in self._numbers:
            self._numbers[value] = next(self._count)
        return f"#{self._numbers[value]}"

    def is_computed(self, value: torch.Tensor) -> bool:
        """Return whether a tensor has numbers, or was computed from some."""
        return bool(self._known.get(value, False))

    def is_written(self, value: torch.Tensor) -> bool:
        """Return whether an operation has changed a tensor in place."""
        return value in self._written

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in _COLLECTIVES:
            raise Forbidden(f"it makes a collective call, {func}, which the other ranks would not make")
        leaves = tree_leaves((args, kwargs))
        taken = [value for value in leaves if isinstance(value, torch.Tensor)]
        for tensor in taken:
            name = self._live_name(tensor)
            if name is not None:
                raise Forbidden(f"it uses the live tensor {name}, of which a rank may have a shard: {func}")
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[position] if position < len(args) else kwargs.get(argument.name)
                for tensor in tree_leaves(value):
                    if isinstance(tensor, torch.Tensor) and tensor not in self._known:
                        raise Forbidden(f"it writes into a tensor that is not in the dict: {func}")
                    if isinstance(tensor, torch.Tensor):
                        self._written[tensor] = True
        self.trace.append((str(func), tuple(value for value in leaves if not isinstance(value, torch.Tensor))))
        self.is_closed = self.is_closed and all(tensor in self._numbers for tensor in taken)
        result = func(*args, **kwargs)
        self.flow.append((str(func), *kwargs, *map(self.number, leaves), *map(self.number, tree_leaves(result))))
        is_computed = any(self._known.get(tensor, False) for tensor in taken)
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._known[tensor] = is_computed or self._known.get(tensor, False)
        return result

    def _live_name(self, tensor: torch.Tensor) -> str | None:
        if tensor in self._known:
            return None
        if id(tensor) in self._live:
            return self._live[id(tensor)]
        return self._memory.get(_memory_of(tensor)) if self._memory else None


def _memory_of(tensor: torch.Tensor) -> int:
    """Return where the elements are in memory; 0 where this is not known."""
    if is_dtensor(tensor):
        tensor = local_of(tensor)
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return 0
    return tensor.untyped_storage().data_ptr()


@contextmanager
def untouched(unit: HookedUnit) -> Iterator[list[str]]:
    """A context after which the modules are as they were before it. Yields a list, in which it then has what was changed."""
    changed = list[str]()
    before = [_Contents(module) for module in unit.modules]
    generator = torch.get_rng_state()
    try:
        yield changed
    finally:
        torch.set_rng_state(generator)
        for contents in before:
            changed += contents.restore()


class _Contents:
    """What a module has: its attributes, and where its tensors are in memory."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._attributes = dict(vars(module))
        self._tensors = {
            name: (tensor, tensor.detach() if type(tensor) in (torch.Tensor, nn.Parameter) else None)
            for name, tensor in contents_of(module)
        }

    def restore(self) -> Iterator[str]:
        """Put back what is no longer there. Yields what that was."""
        own, kind = vars(self._module), type(self._module).__name__
        for name in own.keys() | self._attributes.keys():
            if name not in self._attributes:
                yield f"the attribute {name} of this {kind}"
                del own[name]
            elif own.get(name, own) is not self._attributes[name]:
                yield f"the attribute {name} of this {kind}"
                own[name] = self._attributes[name]
        now = dict(contents_of(self._module))
        for name in now.keys() - self._tensors.keys():
            yield f"the tensor {name} of this {kind}"
            delattr(self._module, name)
        for name, (tensor, elements) in self._tensors.items():
            if now.get(name) is not tensor:
                yield f"the tensor {name} of this {kind}"
                setattr(self._module, name, tensor)
            if elements is not None and _memory_of(tensor) != _memory_of(elements):
                yield f"the elements of {name} of this {kind}"
                tensor.data = elements
