"""Opaque values are bytes in tensor files, and not in the manifest; quantised blocks need no pickle."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kit.compare import Differs, check_same, error_text
from kit.folders import InFolder
from kit.local_parts import local_of
from kit.opaque import Wide, eight_bits
from kit.options import as_options
from kit.trained import Trained
from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim.state.values import same
from fsdp_optim.testing import run_on_ranks

_MOST = 20_000  # bytes of a manifest of these models


class Blob:
    """An object that is its bytes."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Blob) and self.data == other.data

    __hash__ = None  # type: ignore[assignment]


def everything_in(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


def of_eight_bits(steps: int) -> Trained:
    """As torchao's first step makes its state, which compiles for a minute; with other numbers after `steps`."""
    trained = Trained("FSDP2", eight_bits, 0, Wide)
    for number, param in enumerate(trained.params if steps else ()):
        state = trained.optim.state[param]
        state["step"] = torch.tensor(float(steps))
        for name, is_signed in (("exp_avg", True), ("exp_avg_sq", False)):
            state[name] = trained.optim._new_buffer(param, is_signed)
            held = local_of(state[name])
            for part in (held.codes, held.scale) if hasattr(held, "codes") else (held,):
                part.copy_(torch.arange(part.numel()).view(part.shape) % 251 + number + dist.get_rank())
    return trained


def eight_bits_come_back(folder: str) -> None:
    """Without a pickle, to the bit."""
    trained, target = of_eight_bits(2), of_eight_bits(0)
    path = Path(folder, "a")
    fsdp_optim.save(path, trained.model, trained.optim)
    fsdp_optim.load(path, target.model, target.optim, options=fsdp_optim.LoadOptions(compare=True))
    for param, loaded_param in zip(trained.params, target.params, strict=True):
        for name, value in trained.optim.state[param].items():
            check_same(name, same(target.optim.state[loaded_param][name], value), True)
    blocks = [type(local_of(values["exp_avg"])).__name__ for values in target.optim.state.values()]
    check_same("of 8 bits", blocks.count("OptimState8bit"), 2)
    if dist.get_rank() == 0:
        if b"$pickle" in everything_in(path) or b"OptimState8bit" not in everything_in(path):
            raise Differs("pickled, or not written by its parts")
        check_same("a small manifest", (path / "fsdp_optim.json").stat().st_size < _MOST, True)


class BlocksTest(InFolder):
    def test_8_bit_adam_of_torchao(self) -> None:
        try:
            import torchao.optim  # noqa: F401
        except ImportError as error:
            self.skipTest(f"torchao is not installed: {error}")
        run_on_ranks(eight_bits_come_back, 2, str(self.root))

    @parameterized.expand(
        [
            ("bytes", lambda data: data, False),
            ("a bytearray", bytearray, False),
            ("inside", lambda data: {"blocks": [(data, 3), data[:5000]]}, False),
            ("an object", Blob, True),
        ]
    )
    def test_many_bytes_are_a_tensor(self, _: str, value_of: Callable[[bytes], Any], pickled: bool) -> None:
        data = torch.randint(256, (1 << 20,), dtype=torch.uint8).numpy().tobytes()
        for num in (0, 1, 4096, 4097, len(data)):
            model = nn.Linear(3, 2)
            optim, fresh = (torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for _ in range(2))
            value = value_of(data[:num])
            optim.state[model.weight]["blocks"] = value
            path, options = self.root / str(num), {"allow_pickle": pickled}
            if pickled:
                kind, text = error_text(partial(fsdp_optim.save, path, model, optim))
                check_same("named", (kind, "blocks" in text, "allow_pickle" in text), ("CheckpointError", True, True))
            fsdp_optim.save(path, model, optim, state={"value": value}, **as_options(fsdp_optim.SaveOptions, **options))
            restored = fsdp_optim.load(
                path, model, fresh, **as_options(fsdp_optim.LoadOptions, **options, compare=True)
            )
            for got in (fresh.state[model.weight]["blocks"], restored.state["value"]):
                self.assertEqual((type(got), got), (type(value), value))
            manifest = (path / "fsdp_optim.json").read_bytes()
            self.assertLess(len(manifest), _MOST)
            if num > 5000:
                self.assertIsNone(json.loads(manifest)["checkpoint"]["optim"])
                self.assertLess(len(everything_in(path)), 2.1 * len(data) + 3 * _MOST + 20_000)

    def test_bytes_that_are_none(self) -> None:
        """A number that is no tensor of bytes is damage, told as such."""
        from fsdp_optim import CheckpointError
        from fsdp_optim.formats.base.codec import Decoder

        for said in (0, 1, True, None, [0]):
            with self.assertRaises(CheckpointError):
                Decoder("here", [torch.ones(4)]).decode({"$bytes": said})
