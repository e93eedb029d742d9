"""show and extract: figures and files of single values, compared with what numpy and torch say about the same tensors."""

from __future__ import annotations

import itertools
import math
import os
import unittest
from typing import Any

import numpy
import torch
from kit.conversions import MEMORY
from kit.folders import InFolder, SharedFolder
from kit.forked import run
from kit.optimizers import adam
from kit.rank_files import Buffered, save_fairscale
from kit.trained import Oracle, Trained
from kit.wrapping import cpu
from parameterized import parameterized
from safetensors.torch import load_file
from torch import Tensor, nn

import fsdp_optim
from fsdp_optim import CheckpointError, StateError
from fsdp_optim.testing import run_on_ranks

QUICK = fsdp_optim.SaveOptions(durable=False, progress=False)
CONVERT = fsdp_optim.ConvertOptions(durable=False, progress=False)
INTEGERS = ("bool", "uint8", "int8", "int16", "int32", "int64")
FLOATS = ("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2")
SLICES = {
    "0:3, :5": (slice(0, 3), slice(None, 5)),
    "-2:": (slice(-2, None),),
    "1": (1,),
    "[2:4, 3]": (slice(2, 4), 3),
    "": (),
}


class Mixed(nn.Module):
    """A buffer of each dtype, one with NaNs and infinities, and two that are cut into several windows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        for name in (*INTEGERS, *FLOATS):
            values = torch.randint(0, 2, (6, 7)) if name in INTEGERS else torch.randn(6, 7)
            self.register_buffer(f"of_{name}", values.to(getattr(torch, name)))
        self.register_buffer("of_complex64", torch.randn(6, 7, dtype=torch.complex64))
        odd = torch.randn(6, 7)
        odd[0, 0], odd[2, 3], odd[5, 6], odd[1, 1] = math.nan, math.inf, -math.inf, 0.0
        self.register_buffer("odd", odd)
        self.register_buffer("large", torch.randn(530, 501))
        self.register_buffer("counts", torch.arange(2**62, 2**62 + 140_000))
        self.register_buffer("none", torch.empty(0, 3))
        self.register_buffer("single", torch.tensor(2.5))


def elements_of(tensor: Tensor) -> list[Any]:
    """All elements as numbers of Python; of complex ones the absolute values."""
    flat = tensor.flatten()
    if flat.is_complex():
        flat = flat.abs()
    return flat.to(torch.float64).tolist() if flat.dtype.is_floating_point else flat.to(torch.int64).tolist()


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(*(tensor.contiguous().view(-1).view(torch.uint8) for tensor in (a, b)))


class MixedTest(SharedFolder):
    @classmethod
    def fill(cls) -> None:
        cls.model = Mixed()
        fsdp_optim.save(cls.root / "safetensors", cls.model, options=QUICK)
        for format in ("dcp", "torch"):
            fsdp_optim.convert(cls.root / "safetensors", cls.root / format, format=format, options=CONVERT)

    def check(self, shown: fsdp_optim.ValueStatistics, tensor: Tensor) -> None:
        """Compare the figures with those of all elements, one after the other."""
        elements = elements_of(tensor)
        finite = [element for element in elements if math.isfinite(element)]
        self.assertEqual((shown.shape, shown.nbytes), (tuple(tensor.shape), tensor.nbytes))
        self.assertEqual(shown.num_nans, sum(math.isnan(element) for element in elements))
        self.assertEqual(shown.num_infinities, sum(math.isinf(element) for element in elements))
        self.assertEqual(shown.num_zeros, sum(element == 0 for element in finite))
        self.assertEqual(sum(shown.histogram), len(finite))
        if not finite:
            self.assertEqual((shown.min, shown.max, shown.mean, shown.histogram), (None, None, None, ()))
            return
        close = 1e-6 if tensor.is_complex() else 1e-12
        self.assertAlmostEqual(shown.min, min(finite), delta=close)
        self.assertAlmostEqual(shown.max, max(finite), delta=close)
        norm = math.sqrt(math.fsum(float(element) ** 2 for element in finite))
        self.assertAlmostEqual(shown.norm, norm, delta=close * max(norm, 1))
        mean = math.fsum(finite) / len(finite)
        self.assertAlmostEqual(shown.mean, mean, delta=close * max(abs(mean), 1))

    @parameterized.expand([(name, format) for name in Mixed().state_dict() for format in ("safetensors", "dcp")])
    def test_figures(self, name: str, format: str) -> None:
        shown = fsdp_optim.show(self.root / format, name, bucket_nbytes=MEMORY)
        tensor = self.model.state_dict()[name]
        self.assertEqual((shown.name, shown.dtype), (name, str(tensor.dtype).removeprefix("torch.")))
        self.assertIsNone(shown.elements)
        self.check(shown, tensor)

    def test_integers_are_exact(self) -> None:
        shown = fsdp_optim.show(self.root / "safetensors", "counts")
        self.assertEqual((shown.min, shown.max), (2**62, 2**62 + 139_999))

    def test_a_histogram_is_that_of_numpy(self) -> None:
        shown = fsdp_optim.show(self.root / "safetensors", "large", bins=7)
        counts, _ = numpy.histogram(self.model.large.double().numpy(), 7)
        self.assertEqual(shown.histogram, tuple(counts.tolist()))
        with self.assertRaisesRegex(StateError, "bins"):
            fsdp_optim.show(self.root / "safetensors", "large", bins=0)

    @parameterized.expand(list(itertools.product(("large", "odd", "of_bfloat16"), SLICES, ("safetensors", "dcp"))))
    def test_slices(self, name: str, text: str, format: str) -> None:
        shown = fsdp_optim.show(self.root / format, name, slice=text)
        wanted = self.model.state_dict()[name][SLICES[text]]
        self.check(shown, wanted)
        assert shown.elements is not None
        self.assertEqual(shown.elements.shape, wanted.shape)
        self.assertTrue(same_bits(shown.elements, wanted))

    @parameterized.expand(
        [
            ("0:3, 0, 0", "has 3 dimensions, and the value has 2"),
            ("6", "index 6 of a dimension of 6"),
            ("-7", "index -7 of a dimension of 6"),
            ("0:4:2", "'0:4:2'"),
            ("a:b", "'a:b'"),
        ]
    )
    def test_wrong_slices_are_refused(self, text: str, why: str) -> None:
        with self.assertRaisesRegex(StateError, why):
            fsdp_optim.show(self.root / "safetensors", "odd", slice=text)

    def test_similar_names_are_named(self) -> None:
        with self.assertRaisesRegex(StateError, "has no value 'of_flaot32': did you mean of_float32"):
            fsdp_optim.show(self.root / "safetensors", "of_flaot32")
        with self.assertRaisesRegex(StateError, "has no value 'odd:exp_avg'"):
            fsdp_optim.show(self.root / "safetensors", "odd:exp_avg")

    @parameterized.expand([("safetensors",), ("dcp",), ("torch",)])
    def test_files_of_several(self, format: str) -> None:
        names = list(Mixed().state_dict())
        for ending, read in ((".safetensors", load_file), (".pt", torch.load)):
            file = self.own_folder() / f"some{ending}"
            result = fsdp_optim.extract(self.root / format, names, file, bucket_nbytes=MEMORY)
            self.check_file(read(file), {name: self.model.state_dict()[name] for name in names})
            self.assertEqual((result.path, result.num_tensors), (file, len(names)))
            self.assertEqual([path.name for path in file.parent.iterdir()], [file.name])

    def check_file(self, tensors: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
        self.assertEqual(set(tensors), set(wanted))
        for name, value in wanted.items():
            self.assertEqual((tensors[name].dtype, tensors[name].shape), (value.dtype, value.shape), name)
            self.assertTrue(same_bits(tensors[name], value), name)

    @parameterized.expand([(name,) for name in Mixed().state_dict() if "bfloat16" not in name and "float8" not in name])
    def test_files_of_numpy(self, name: str) -> None:
        file, wanted = self.own_folder() / "x.npy", self.model.state_dict()[name].numpy()
        fsdp_optim.extract(self.root / "dcp", name, file)
        array = numpy.load(file)
        self.assertEqual((array.dtype, array.shape, array.tobytes()), (wanted.dtype, wanted.shape, wanted.tobytes()))

    def test_slices_in_files(self) -> None:
        folder, part = self.own_folder(), self.model.large[3:400, 7]
        for ending in (".npy", ".safetensors", ".pt"):
            fsdp_optim.extract(self.root / "dcp", ["large"], folder / f"x{ending}", slice="3:400, 7")
        self.assertTrue(numpy.array_equal(numpy.load(folder / "x.npy"), part.numpy()))
        for extracted in (load_file(folder / "x.safetensors"), torch.load(folder / "x.pt")):
            self.assertTrue(torch.equal(extracted["large"], part))

    def test_what_cannot_be_written_is_refused(self) -> None:
        folder = self.own_folder()
        (folder / "there.pt").write_text("mine")
        for names, name, why in (
            ("odd", "there.pt", "there.pt: already exists"),
            ("odd", "x.bin", "must end with .npy, .safetensors or .pt"),
            (["odd", "large"], "x.npy", "has one array, and 2 names"),
            ("of_bfloat16", "x.npy", "numpy has no dtype for bfloat16"),
            ([], "x.pt", "no names"),
            ("odd", "no/such/x.pt", "cannot be created"),
        ):
            with self.assertRaisesRegex((CheckpointError, StateError), why):
                fsdp_optim.extract(self.root / "dcp", names, folder / name)
        self.assertEqual([path.name for path in folder.iterdir()], ["there.pt"])
        self.assertEqual((folder / "there.pt").read_text(), "mine")
        fsdp_optim.extract(self.root / "dcp", "odd", folder / "there.pt", overwrite=True)
        self.assertEqual(list(torch.load(folder / "there.pt")), ["odd"])

    def test_a_slice_that_does_not_fit_into_memory_is_refused(self) -> None:
        place = self.own_folder() / "big"
        model = nn.Linear(4096, 1024, bias=False)
        fsdp_optim.save(place, model, options=QUICK)
        with self.assertRaisesRegex(StateError, "use extract"):
            fsdp_optim.show(place, "weight", slice=":", bucket_nbytes=MEMORY)


def save_shards(root: str) -> None:
    with cpu():
        trained = Trained("fairscale flat", adam, model=Buffered)
        save_fairscale(f"{root}/fairscale", "checkpoint_last", trained.model, trained.optim)
        sharded = Trained("FSDP2", adam, model=Buffered)
        fsdp_optim.save(f"{root}/ours", sharded.model, sharded.optim, options=QUICK)


class ShardsTest(SharedFolder):
    @classmethod
    def fill(cls) -> None:
        (cls.root / "fairscale").mkdir()
        run_on_ranks(save_shards, 2, str(cls.root))

    @parameterized.expand([("fairscale",), ("ours",)])
    def test_full_values_of_shards(self, place: str) -> None:
        oracle, file = Oracle(adam, model=Buffered), self.own_folder() / "x.pt"
        wanted = dict(oracle.model.named_parameters())
        wanted |= {f"{fqn}:exp_avg": state["exp_avg"] for fqn, state in oracle.by_name().items()}
        fsdp_optim.extract(self.root / place, list(wanted), file)
        extracted = torch.load(file)
        self.assertEqual(list(extracted), list(wanted))
        for name, value in wanted.items():
            self.assertTrue(torch.equal(extracted[name], value.detach()), name)


class KilledTest(InFolder):
    def test_a_killed_call_leaves_no_file(self) -> None:
        fsdp_optim.save(self.path, nn.Linear(512, 512), options=QUICK)
        done = run(f"""
import os, signal
import fsdp_optim
from fsdp_optim.storage.posix import new_file
real = new_file.NewFile.write
def write(self, data):
    real(self, data)
    if self.at > 4096:
        os.kill(os.getpid(), signal.SIGKILL)
new_file.NewFile.write = write
fsdp_optim.extract({str(self.path)!r}, ["weight", "bias"], {str(self.root / "x.pt")!r})
""")
        self.assertNotEqual(done.returncode, 0)
        self.assertEqual([name for name in os.listdir(self.root) if not name.startswith(".")], ["step-1"])
        self.assertTrue(any(name.startswith(".x.pt.") for name in os.listdir(self.root)))
        fsdp_optim.extract(self.path, ["weight", "bias"], self.root / "x.pt")
        self.assertEqual(sorted(torch.load(self.root / "x.pt")), ["bias", "weight"])


if __name__ == "__main__":
    unittest.main()
