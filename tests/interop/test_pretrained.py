"""`load` takes the weights of what Hugging Face and safetensors have written: sliced by each rank, tied, renamed, cast."""

from __future__ import annotations

import json
import struct
import unittest
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from kit.cases import expand
from kit.compare import Differs, check_same, error_text, refused_on_ranks
from kit.folders import SharedFolder
from kit.options import as_options
from kit.pretrained import build, tensors_of
from kit.store_calls import url_of
from kit.wrapping import cpu
from kit.wraps import WRAPPERS
from safetensors.torch import load_file, save_file
from torch import nn

import fsdp_optim
from fsdp_optim.buckets.objects import MemoryBucket, ObjectStore
from fsdp_optim.checkpoint.load import short_ranges
from fsdp_optim.foreign.reader import ForeignReader
from fsdp_optim.formats.own import PROBE
from fsdp_optim.testing import run_on_ranks

LOADED = ("kit.loaded.hugging_face",)
SMALL = 3000  # bytes of one file, where a model is split
CASES = (
    ("llama, tied", "FSDP2", "whole"),
    ("llama, bfloat16", "FSDP1 orig", "split"),
    ("gpt2, tied", "FSDP1 flat", "split"),
    ("gpt2, tied", "fairscale flat", "whole"),
    ("bert", "FSDP2", "split"),
    ("t5, tied", "DDP", "whole"),
    ("resnet, with buffers", "FSDP2", "whole"),
    ("resnet, with buffers", "fairscale non-flat", "split"),
)


def of_zeros(name: str) -> Any:
    """A model of the same shapes with other values everywhere."""
    model = build(name)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_() if tensor.is_floating_point() else None
    return model


def weights_of(model: nn.Module, folder: Path) -> dict[str, torch.Tensor]:
    """All weights of a live model, as they are saved: each under one name."""
    fsdp_optim.save(
        folder,
        model,
        options=fsdp_optim.SaveOptions(durable=False, progress=False, process_group=dist.group.WORLD),
        overwrite=True,
    )
    weights = load_file(folder / "model.safetensors")
    dist.barrier()  # before another case saves to the same place
    return weights


def wanted_of(name: str) -> dict[str, torch.Tensor]:
    """The weights that were saved, under all their names."""
    return dict(build(name).state_dict())


def check_weights(model: nn.Module, name: str, folder: Path, dtype: torch.dtype | None = None) -> None:
    """The live weights are those of the pretrained model, under each of their names."""
    saved, wanted = weights_of(model, folder), wanted_of(name)
    stored = {key: tensor for key, tensor in wanted.items() if key in saved}
    check_same("names", sorted(saved), sorted(stored))
    check_same("number of weights", len(saved), len({tensor.data_ptr() for tensor in wanted.values()}))
    for key, tensor in stored.items():
        as_loaded = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
        check_same(key, saved[key], as_loaded)


def load_all(root: Path, cases: Sequence[tuple[str, str, str]]) -> None:
    """Each case: bit for bit, the same as the model that was saved; and each rank has read its slices only."""
    for name, wrapper, how in cases:
        path = root / f"{name} {how}"
        with cpu(), mock.patch.object(short_ranges, "_GAP_NBYTES", 0):  # no short pieces between them come along
            model = WRAPPERS[wrapper](of_zeros(name))
            options = {"process_group": dist.group.WORLD} if wrapper == "DDP" else {}
            restored = fsdp_optim.load(
                path, model, **as_options(fsdp_optim.LoadOptions, **options, compare=True, progress=False)
            )
            check_weights(model, name, root / f"live {name} {wrapper}")
            check_same(
                "the rest", (dict(restored.state), restored.missing_keys, restored.unexpected_keys), ({}, (), ())
            )
            read = torch.tensor(restored.nbytes)
            dist.all_reduce(read)
            total = sum(file.stat().st_size for file in path.glob("*.safetensors"))
            if read > total:
                raise Differs(f"{name}: {read} of {total} bytes were read")


def load_otherwise(root: Path) -> None:
    """From the path of a file and of an index, through links, from the meta device, renamed, cast, by part."""
    whole, split = root / "bert whole", root / "bert split"
    for place in (whole / "model.safetensors", split / "model.safetensors.index.json", root / "links"):
        model = WRAPPERS["FSDP2"](of_zeros("bert"))
        fsdp_optim.load(place, model, options=fsdp_optim.LoadOptions(compare=True))
        check_weights(model, "bert", root / "live")
    with torch.device("meta"):
        model = WRAPPERS["FSDP2"](build("bert"))
    kind, text = error_text(lambda: fsdp_optim.load(whole, model))
    if "meta" not in text:
        raise Differs(f"a model on the meta device: {kind}: {text}")
    model.to_empty(device="cpu")
    for layer in model.modules():  # buffers that are not saved
        if hasattr(layer, "position_ids"):
            layer.position_ids.copy_(torch.arange(layer.position_ids.numel()).view_as(layer.position_ids))
    fsdp_optim.load(whole, model, options=fsdp_optim.LoadOptions(compare=True))
    check_weights(model, "bert", root / "live")
    for rename in ({"base.": ""}, lambda name: name.removeprefix("base."), {"base.be": "be", "base.c": "c", "x": "y"}):
        model = WRAPPERS["FSDP1 flat"](of_zeros("bert"))
        fsdp_optim.load(root / "renamed", model, options=fsdp_optim.LoadOptions(rename=rename, compare=True))
        check_weights(model, "bert", root / "live")
    model = WRAPPERS["FSDP2"](of_zeros("bert").bfloat16())
    kind, text = error_text(lambda: fsdp_optim.load(whole, model))
    if "cast=True" not in text:
        raise Differs(f"another dtype: {kind}: {text}")
    fsdp_optim.load(whole, model, options=fsdp_optim.LoadOptions(cast=True, compare=True))
    check_weights(model, "bert", root / "live", torch.bfloat16)
    model = WRAPPERS["FSDP2"](of_zeros("bert"))
    restored = fsdp_optim.load(
        root / "renamed", model.bert, options=fsdp_optim.LoadOptions(rename={"base.bert.": ""}), strict=False
    )
    check_same("not in the model", sorted(restored.unexpected_keys), ["base.classifier.bias", "base.classifier.weight"])


def load_tied(root: Path, wrapper: str) -> None:
    """Tied weights that are stored under each of their names: equal copies are one, and others an error."""
    model = WRAPPERS[wrapper](of_zeros("gpt2, tied"))
    fsdp_optim.load(
        root / "both names", model, options=fsdp_optim.LoadOptions(compare=True, process_group=dist.group.WORLD)
    )
    check_weights(model, "gpt2, tied", root / "live")
    for name, word in (("differs", "differ"), ("other shape", "shape")):
        place = root / name
        refused_on_ranks(name, partial(fsdp_optim.load, place, model), "StateError", "lm_head", "wte", word)
    check_weights(model, "gpt2, tied", root / "live")
    restored = fsdp_optim.load(
        root / "differs", model, strict=False, options=fsdp_optim.LoadOptions(process_group=dist.group.WORLD)
    )
    check_same("the first name counts", restored.unexpected_keys, ("lm_head.weight",))
    check_weights(model, "gpt2, tied", root / "live")


def refuse_all(root: Path) -> None:
    """An incomplete checkpoint is refused on all ranks alike, and the model stays as it is."""
    model = WRAPPERS["FSDP2"](of_zeros("bert"))  # one for all, because nothing may change it
    for name, kind, words in REFUSED:
        refused_on_ranks(name, partial(fsdp_optim.load, root / name, model), kind, *words)
        if any(bool(param.to_local().any()) for param in model.parameters()):  # type: ignore[operator]
            raise Differs(f"{name}: a part was loaded")
    optim = torch.optim.Adam(model.parameters())
    refused_on_ranks(
        "an optimizer", lambda: fsdp_optim.load(root / "bert whole", model, optim), "StateError", "without an optimizer"
    )
    refused_on_ranks(
        "a rename that is none",
        lambda: fsdp_optim.load(root / "bert whole", model, options=fsdp_optim.LoadOptions(rename=[1])),
        "StateError",
        "rename",
    )  # type: ignore[arg-type]
    refused_on_ranks(
        "another model", lambda: fsdp_optim.load(root / "llama, tied whole", model), "StateError", "differences"
    )


REFUSED: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("cut", "CheckpointError", ("model.safetensors", "cut short")),
    ("no header", "CheckpointError", ("model.safetensors", "bytes are too few")),
    ("wrong header", "CheckpointError", ("model.safetensors", "header")),
    ("a gap", "CheckpointError", ("model.safetensors", "gap")),
    ("a file is missing", "CheckpointError", ("model-00002-of", "missing")),
    ("not in the index", "CheckpointError", ("index.json", "classifier.bias")),
    ("in two files", "CheckpointError", ("is in", "too")),
    ("leads out", "CheckpointError", ("../", "not inside")),
    ("two files and no index", "CheckpointError", ("a.safetensors, b.safetensors",)),
    ("one of three", "CheckpointError", ("number 2 is missing",)),
    ("of a save of ours", "CheckpointError", ("fsdp_optim.json",)),
    ("nothing", "CheckpointError", ("fsdp_optim.json",)),
)


def make_refused(root: Path) -> None:
    """The folders of REFUSED."""
    tensors = load_file(root / "bert whole" / "model.safetensors")
    data = (root / "bert whole" / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    for name, _, _ in REFUSED:
        (root / name).mkdir()
    (root / "cut" / "model.safetensors").write_bytes(data[:-1])
    (root / "no header" / "model.safetensors").write_bytes(data[:5])
    (root / "wrong header" / "model.safetensors").write_bytes(data[:8] + b"[" + data[9:])
    header = json.loads(data[8 : 8 + length])
    last = max((entry for entry in header.values() if "data_offsets" in entry), key=lambda entry: entry["data_offsets"])
    last["data_offsets"] = [number + 4 for number in last["data_offsets"]]
    text = json.dumps(header).encode()
    (root / "a gap" / "model.safetensors").write_bytes(
        struct.pack("<Q", len(text)) + text + data[8 + length :] + bytes(4)
    )
    split = sorted((root / "bert split").iterdir())
    for name in ("a file is missing", "not in the index", "in two files", "leads out"):
        for file in split:
            (root / name / file.name).write_bytes(file.read_bytes())
    (root / "a file is missing" / split_file(root, 2)).unlink()
    edit_index(root / "not in the index", lambda listed: listed.pop("classifier.bias"))
    edit_index(root / "leads out", lambda listed: listed.update({"classifier.bias": "../model.safetensors"}))
    first = root / "in two files" / split_file(root, 1)
    save_file({**load_file(first), "classifier.bias": tensors["classifier.bias"]}, first)
    for name in ("a", "b"):
        save_file(tensors, root / "two files and no index" / f"{name}.safetensors")
    for number in (1, 3):
        save_file({f"{number}": torch.zeros(2)}, root / "one of three" / f"model-{number:05}-of-00003.safetensors")
    for name in ("model", "optim"):
        save_file(tensors, root / "of a save of ours" / f"{name}.safetensors")


def split_file(root: Path, number: int) -> str:
    return next((root / "bert split").glob(f"model-{number:05}-of-*.safetensors")).name


def edit_index(folder: Path, edit: Callable[[dict[str, str]], object]) -> None:
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    edit(index["weight_map"])
    file.write_text(json.dumps(index))


class PretrainedTest(SharedFolder):
    @classmethod
    def fill(cls) -> None:
        for name, how in {(name, how) for name, _, how in CASES} | {("bert", "whole"), ("bert", "split")}:
            options = {"max_shard_size": SMALL} if how == "split" else {}
            build(name).save_pretrained(cls.root / f"{name} {how}", **options)

    @expand(soon=[(2, CASES[::2]), (3, CASES[1::2])], later=[(2, CASES[1::2]), (3, CASES[::2])])
    def test_every_wrapper_takes_its_slices(self, size: int, cases: Sequence[tuple[str, str, str]]) -> None:
        run_on_ranks(load_all, size, self.root, cases)

    def test_other_places_names_and_dtypes(self) -> None:
        (self.root / "links").mkdir()
        for file in (self.root / "bert split").iterdir():
            (self.root / "links" / file.name).symlink_to(file)
        (self.root / "renamed").mkdir()
        tensors = load_file(self.root / "bert whole" / "model.safetensors")
        save_file(
            {f"base.{name}": tensor for name, tensor in tensors.items()}, self.root / "renamed" / "any.safetensors"
        )
        run_on_ranks(load_otherwise, 2, self.root)

    def test_tied_weights_under_both_names(self) -> None:
        tensors = {name: tensor.clone() for name, tensor in wanted_of("gpt2, tied").items()}
        for name in ("both names", "differs", "other shape"):
            (self.root / name).mkdir()
            if name == "differs":
                tensors["lm_head.weight"][-1, -1] += 1
            elif name == "other shape":
                tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1]
            save_file(tensors, self.root / name / "model.safetensors")
        for wrapper in ("FSDP2", "FSDP1 flat"):
            run_on_ranks(load_tied, 2, self.root, wrapper)

    def test_what_is_not_whole_is_refused(self) -> None:
        make_refused(self.root)
        run_on_ranks(refuse_all, 2, self.root)

    def test_from_a_bucket(self) -> None:
        """The objects of a prefix, and one object, are read as the files of a folder are."""
        bucket = MemoryBucket()
        for file in (self.root / "bert split").iterdir():
            bucket.put(f"models/bert/{file.name}", file.read_bytes())
        for place in ("models/bert", "models/bert/model.safetensors.index.json"):
            model = of_zeros("bert")
            with url_of(ObjectStore(bucket, place, PROBE)) as url:
                fsdp_optim.load(url, model, options=fsdp_optim.LoadOptions(compare=True))
            check_same(place, tensors_of(model), tensors_of(build("bert")))

    def test_a_file_that_is_written_again_meanwhile(self) -> None:
        """The load begins anew and takes the new file, or gives up; it never mixes the two."""
        model, path = of_zeros("bert"), self.root / "again"
        path.mkdir()
        old = load_file(self.root / "bert whole" / "model.safetensors")
        save_file(old, path / "model.safetensors")
        check, times = ForeignReader.check_unchanged, []

        def written_again(reader: ForeignReader) -> None:
            if not times:
                save_file({name: tensor + 1 for name, tensor in old.items()}, path / "model.safetensors")
            times.append(1)
            check(reader)

        with mock.patch.object(ForeignReader, "check_unchanged", written_again):
            fsdp_optim.load(path, model)
        check_same("times", len(times), 2)
        weights = dict(sorted(model.state_dict().items()))
        check_same("the new file", weights, {name: old[name] + 1 for name in sorted(old)})

    def test_flags_that_are_none(self) -> None:
        """A byte other than 0 and 1 in a tensor of bools is refused, as in our own checkpoints."""
        model = nn.Linear(2, 2)
        model.register_buffer("flags", torch.tensor([True, False, True]))
        path = self.root / "flags.safetensors"
        save_file(model.state_dict(), path)
        fsdp_optim.load(path, model)
        data = path.read_bytes()
        where = data.rindex(b"\x01\x00\x01")
        path.write_bytes(data[:where] + b"\x01\x02\x01" + data[where + 3 :])
        with self.assertRaisesRegex(fsdp_optim.CheckpointError, "flags is a bool tensor, and one of its bytes is 2"):
            fsdp_optim.load(path, model)


if __name__ == "__main__":
    unittest.main()
