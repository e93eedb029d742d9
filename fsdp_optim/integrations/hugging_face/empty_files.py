"""`from_pretrained` of transformers without the weights: its tensors have memory that nothing has written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from fsdp_optim.integrations.common.patches import status_in


def without_reading(models: Any, note: Callable[[nn.Module], None]) -> Callable[..., Any]:
    """`PreTrainedModel._load_pretrained_model`, which reads headers of safetensors alone and hands the model to `note`.

    `models`: the module `transformers.modeling_utils`. Torch files, quantized models and adapters are read as before: what is
    read is not noted.
    """
    original = models.PreTrainedModel._load_pretrained_model

    def load(
        model: nn.Module, state_dict: Any, checkpoint_files: Any, load_config: Any, expected_keys: Any = None
    ) -> Any:
        is_plain = state_dict is None and expected_keys is None and load_config.hf_quantizer is None
        if not (is_plain and checkpoint_files and checkpoint_files[0].endswith(".safetensors")):
            return original(model, state_dict, checkpoint_files, load_config, expected_keys)
        tied = getattr(model, "all_tied_weights_keys", None) or {}
        opened = _Opened(models.safe_open, models.str_to_torch_dtype, {*tied, *tied.values()})
        with status_in(models, safe_open=opened.open):
            result = original(model, state_dict, checkpoint_files, load_config, expected_keys)
        note(model)
        return result

    return load


class _Opened:
    """The files of one model. `tied`: the names of its tied weights, of which `from_pretrained` compares the values."""

    def __init__(self, safe_open: Callable[..., Any], dtypes: Mapping[str, torch.dtype], tied: Iterable[str]) -> None:
        self._safe_open, self.dtypes = safe_open, dtypes
        self._tied = frozenset(tied)
        self._names: set[str] = set()

    def open(self, *args: Any, **kwargs: Any) -> _File:
        file = self._safe_open(*args, **kwargs)
        self._names.update(file.keys())
        return _File(file, self)

    def must_read(self, name: str) -> bool:
        """Whether the values of this tensor are compared: those of tied weights, where the files have both."""
        return name in self._tied and len(self._tied & self._names) > 1


class _File:
    """A file of safetensors whose slices are without values."""

    def __init__(self, file: Any, opened: _Opened) -> None:
        self._file, self._opened = file, opened

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _File:
        self._file.__enter__()
        return self

    def __exit__(self, *error: object) -> Any:
        return self._file.__exit__(*error)

    def get_slice(self, name: str) -> _Slice:
        return _Slice(self._file.get_slice(name), name, self._opened)


class _Slice:
    """A tensor of a file, which is not read when it is asked for."""

    def __init__(self, stored: Any, name: str, opened: _Opened) -> None:
        self._stored, self._name, self._opened = stored, name, opened

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stored, name)

    def __getitem__(self, index: Any) -> torch.Tensor:
        if index is not Ellipsis or self._opened.must_read(self._name):
            return self._stored[index]  # type: ignore[no-any-return]
        return torch.empty(self._stored.get_shape(), dtype=self._opened.dtypes[self._stored.get_dtype()])
