"""The command line: what each command does, prints and returns."""

from __future__ import annotations

import os
import shutil
import socket
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from kit.commands import called
from kit.conversions import check_converted, save_some
from kit.folders import SharedFolder
from kit.forked import LIBRARY, run, start
from kit.options import as_options
from parameterized import parameterized
from safetensors.torch import save_file
from torch import nn

import fsdp_optim
from fsdp_optim.cli.tree import shown
from fsdp_optim.cli.units import size_of, sized
from fsdp_optim.plugins import DeepSpeedUniversal, FairscaleShards, TorchFiles


class Block(nn.Module):
    def __init__(self, width: int, wide: int) -> None:
        super().__init__()
        self.attn = nn.Linear(width, wide, bias=False)
        self.norm = nn.LayerNorm(width)


class Layers(nn.Module):
    """`num` equal layers, and one in the middle that is wider."""

    def __init__(self, num: int, odd: int | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.layers = nn.ModuleList(Block(4, 8 if index == odd else 4) for index in range(num))
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight


def save(path: Path, model: nn.Module, **options: Any) -> Any:
    optim = torch.optim.AdamW(model.parameters(), lr=0.5)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optim.step()
    return fsdp_optim.save(path, model, optim, **as_options(fsdp_optim.SaveOptions, **options, durable=False))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class CommandLineTest(SharedFolder):
    @classmethod
    def fill(cls) -> None:
        save_some(cls.root / "source")
        save(cls.root / "layers", Layers(400), step=7, extra={"lr": 1}, per_rank_extra=[0])
        save_file({"model.weight": torch.ones(2, 3)}, cls.root / "plain.safetensors")

    def setUp(self) -> None:
        self.folder = self.own_folder()

    def inspected(self, path: Path, *options: str) -> list[str]:
        code, out, err = called("inspect", path, *options)
        self.assertEqual((code, err), (0, ""))
        return out.splitlines()

    # --------------------------------------------------------------------------------------- convert

    def test_convert(self) -> None:
        code, out, _ = called(
            "convert", self.root / "source", self.folder / "to", "--max-file-size", "2MiB", "--not-durable"
        )
        self.assertEqual(code, 0)
        self.assertRegex(out, r"^\S+/to: 33 tensors, 12\.6 MB in \d+\.\d s \(\S+ \wB/s\)\n$")
        wanted = self.folder / "wanted"
        fsdp_optim.convert(
            self.root / "source", wanted, options=fsdp_optim.ConvertOptions(max_file_size=2 << 20, durable=False)
        )
        check_converted(self.folder / "to", wanted)

    def test_its_options_are_those_of_the_function(self) -> None:
        names = self.folder / "names"
        names.write_text("a.weight\n\nb.weight\n")
        units = self.folder / "units"
        units.write_text('{"": ["a.weight", "b.weight"]}')
        given = ["--format", "fairscale_shards", "--world-size", "4", "--key-by", "id", "--memory", "1GiB"]
        given += ["--overwrite", "--allow-pickle", "--quiet", "--not-flattened"]
        more = [
            "--units",
            str(units),
            "--names",
            str(names),
            "--storage-option",
            "endpoint_url=http://x",
            "--storage-option",
            "part_nbytes=5",
        ]
        with mock.patch("fsdp_optim.api.convert") as convert:
            convert.return_value.num_tensors = convert.return_value.nbytes = 1
            self.assertEqual(called("convert", "s3://from", "s3://to", *given, *more)[0], 0)
        convert.assert_called_once_with(
            "s3://from",
            "s3://to",
            format=FairscaleShards(4, {"": ["a.weight", "b.weight"]}, flatten_parameters=False),
            overwrite=True,
            options=fsdp_optim.ConvertOptions(
                bucket_nbytes=1 << 30,
                param_names=["a.weight", "b.weight"],
                allow_pickle=True,
                progress=False,
                storage_options={"endpoint_url": "http://x", "part_nbytes": 5},
            ),
        )

    def test_the_options_of_a_format(self) -> None:
        """Flags make the format; one that it does not have is refused."""
        for given, format in {
            ("--format", "torch", "--key-by", "name"): TorchFiles(key_by="name"),
            ("--format", "torch_file", "--key-by", "id"): TorchFiles(one_file=True),
            ("--format", "fairscale"): "fairscale",
            ("--format", "dcp", "--key-by", "name"): "dcp",
            ("--format", "deepspeed_universal"): DeepSpeedUniversal(),
            ("--format", "deepspeed_universal", "--masters", "m", "--fill-missing"): DeepSpeedUniversal("m", True),
        }.items():
            with mock.patch("fsdp_optim.api.convert") as convert:
                convert.return_value.num_tensors = convert.return_value.nbytes = 1
                self.assertEqual(called("convert", "from", "to", *given)[0], 0)
            self.assertEqual(convert.call_args.kwargs["format"], format)
        for given, words in {
            ("--format", "fairscale_shards"): "give --world-size",
            ("--format", "torch", "--world-size", "2"): "--world-size: the format torch has no such option",
            ("--not-flattened",): "--not-flattened: the format safetensors has no such option",
            ("--key-by", "id"): "calls parameters by name",
            (
                "--format",
                "dcp",
                "--masters",
                "m",
                "--fill-missing",
            ): "--masters, --fill-missing: the format dcp has no such",
            ("--format", "deepspeed_universal", "--key-by", "id"): "calls parameters by name",
            ("--format", "fairscale", "--key-by", "name"): "calls parameters by id",
            ("--format", "fairscale_shards", "--world-size", "2", "--key-by", "name"): "call parameters by id",
        }.items():
            code, _, err = called("convert", self.root / "source", self.folder / "to", *given)
            self.assertEqual(code, 2)
            self.assertIn(words, err)

    def test_an_interrupt(self) -> None:
        with mock.patch("fsdp_optim.api.convert", side_effect=KeyboardInterrupt):
            code, out, err = called("convert", self.root / "source", self.folder / "to")
        self.assertEqual((code, out), (1, ""))
        self.assertEqual(err, "fsdp-optim: interrupted\n")

    def test_torchrun(self) -> None:
        """Two processes that a launcher has started share the work; one of them prints."""
        target, port = self.folder / "to", free_port()
        code = f"import sys; sys.argv[1:] = ['convert', {str(self.root / 'source')!r}, {str(target)!r}]\n"
        code += "import runpy; runpy.run_module('fsdp_optim', run_name='__main__', alter_sys=True)"
        begun = []
        for rank in range(2):
            launched = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            environment = {**os.environ, **{name: str(value) for name, value in launched.items()}}
            begun.append(start(code, preload=LIBRARY, environment=environment))
        first, second = (process.wait() for process in begun)
        self.assertEqual((first.returncode, second.returncode), (0, 0), first.stderr + second.stderr)
        self.assertRegex(first.stdout, "33 tensors")
        self.assertEqual((second.stdout, second.stderr), ("", ""))
        fsdp_optim.convert(
            self.root / "source", self.folder / "wanted", options=fsdp_optim.ConvertOptions(durable=False)
        )
        check_converted(target, self.folder / "wanted")

    # --------------------------------------------------------------------------------------- errors

    def test_errors_are_one_line(self) -> None:
        """Exit code 2: wrong use, or nothing is there. Exit code 1: something is there, and is damaged."""
        (self.folder / "empty").mkdir()
        (self.folder / "text").write_text("no checkpoint")
        source, to = self.root / "source", self.folder / "to"
        cases = [
            (["inspect", self.folder / "nothing"], "no such folder", 2),
            (["verify", self.folder / "empty"], "has no fsdp_optim.json", 1),
            (["inspect", self.folder / "text"], "text", 2),
            (["convert", self.folder / "nothing", to], "no such folder", 2),
            (["convert", source, self.root / "layers"], "already exists: .* give --overwrite", 2),
            (
                ["convert", source, to, "--format", "zip"],
                "there is no format 'zip': it must be one of safetensors, dcp",
                2,
            ),
            (["convert", source, to, "--memory", "1MB"], "--memory.* must be at least 16777216 bytes, not 1000000", 2),
            (["convert", source, to, "--names", self.folder / "none"], "file of names", 2),
            (["convert", source, to, "--units", self.folder / "text"], "file of units", 2),
            (["verify", "nobody://knows/this"], "nobody", 2),
        ]
        for arguments, message, exit_code in cases:
            with self.subTest(message):
                code, out, err = called(*arguments)
                self.assertEqual((code, out), (exit_code, ""))
                self.assertRegex(err, rf"\Afsdp-optim: [^\n]*{message}[^\n]*\n\Z")

    def test_wrong_arguments_are_exit_code_2(self) -> None:
        for arguments, message in (
            (["merge"], "no command 'merge'"),
            (["convert", "one"], "DST"),
            (["convert", "a", "b", "--memory", "much"], "'much' is not a size such as 4GB"),
            (["convert", "a", "b", "--key-by", "number"], "'number' is not one of 'id', 'name'"),
            (["inspect", "a", "--storage-option", "endpoint"], "'endpoint' is not KEY=VALUE"),
            (["inspect", "a", "--al"], "--all"),
        ):
            with self.subTest(arguments):
                code, out, err = called(*arguments)
                self.assertEqual((code, out), (2, ""))
                self.assertRegex(err, rf"\Afsdp-optim: [^\n]*{message}[^\n]*--help[^\n]*\n\Z")

    def test_mistakes_of_the_library_are_not_hidden(self) -> None:
        with (
            mock.patch("fsdp_optim.api.inspect", side_effect=AttributeError("mistaken")),
            self.assertRaises(AttributeError),
        ):
            called("inspect", self.root / "source")

    def test_a_reader_that_has_enough(self) -> None:
        code = f"import sys, runpy; sys.argv[1:] = ['inspect', {str(self.root / 'layers')!r}, '--all']\n"
        code += "import os; read, write = os.pipe(); os.close(read); os.dup2(write, 1)\n"
        code += "runpy.run_module('fsdp_optim', run_name='__main__', alter_sys=True)"
        done = run(code, preload=LIBRARY)
        self.assertNotIn("Traceback", done.stderr)

    # --------------------------------------------------------------------------------------- verify

    def test_verify(self) -> None:
        code, out, err = called("verify", self.root / "source")
        self.assertEqual((code, err), (0, ""))
        self.assertRegex(
            out, r"^\S+/source: complete: 33 tensors \(12\.6 MB\) are as they were saved, by their checksums\n$"
        )

    def test_verify_names_all_damage(self) -> None:
        """In tensors of both halves and in an extra; in a header, a table and the manifest it is found at once."""
        damaged = self.folder / "damaged"
        shutil.copytree(self.root / "source", damaged)
        for name in ("model.safetensors", "optim.safetensors", "extra/common.safetensors"):
            content = bytearray((damaged / name).read_bytes())
            content[-1] ^= 1
            (damaged / name).write_bytes(content)
        code, out, err = called("verify", damaged)
        self.assertEqual((code, out), (1, ""))
        self.assertRegex(err, r"\Afsdp-optim: \S+/damaged: 3 damaged places: [^\n]*\n\Z")
        for name in ("model.safetensors", "optim.safetensors", "extra/common.safetensors", "3.bias"):
            self.assertIn(name, err)

    @parameterized.expand([("model.safetensors",), ("optim.safetensors",), ("extra/common.safetensors",)])
    def test_any_changed_byte_is_found(self, name: str) -> None:
        damaged = self.folder / "damaged"
        save(damaged, nn.Linear(3, 2), extra={"a": torch.ones(2)})
        whole = (damaged / name).read_bytes()
        for index in range(0, len(whole), 7):
            content = bytearray(whole)
            content[index] ^= 0x10
            (damaged / name).write_bytes(content)
            with self.assertRaises(fsdp_optim.CheckpointError):
                fsdp_optim.verify(damaged)
        (damaged / name).write_bytes(whole)
        self.assertTrue(fsdp_optim.verify(damaged).has_checksums)

    def test_verify_says_what_could_not_be_checked(self) -> None:
        save(self.folder / "bare", nn.Linear(3, 2), checksums=False)
        _, out, _ = called("verify", self.folder / "bare")
        self.assertRegex(out, "can be read; changed bytes would not show: it was saved without checksums")
        code, out, _ = called("verify", self.root / "plain.safetensors")
        self.assertEqual(code, 0)
        self.assertRegex(out, r"1 tensor \(24 B\) are there.*the format safetensors has no checksums")
        short = self.folder / "short.safetensors"
        short.write_bytes((self.root / "plain.safetensors").read_bytes()[:-1])
        self.assertEqual(called("verify", short)[0], 1)

    # --------------------------------------------------------------------------------------- inspect

    def test_inspect_says_what_there_is(self) -> None:
        lines = self.inspected(self.root / "layers")
        self.assertEqual(lines[0], str(self.root / "layers"))
        facts = dict(line.split(":", 1) for line in lines[1 : lines.index("")])
        self.assertEqual(facts["format"].strip(), "fsdp_optim")
        self.assertRegex(facts["saved at"], r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC")
        self.assertEqual([facts[name].strip() for name in ("ranks", "step")], ["1", "7"])
        self.assertEqual(facts["other values"].strip(), "of the trainer, of 1 rank")
        text = "\n".join(lines)
        self.assertIn("model: 1,201 tensors, 9,640 elements, 38.6 kB", text)
        self.assertRegex(text, r"embed\.weight +\[10, 4\] +float32 +160 B")
        self.assertIn("other names: head.weight = embed.weight", text)
        self.assertIn("optimizer AdamW: state of 1,201 parameters: 3,603 tensors", text)
        self.assertRegex(text, r"exp_avg +like the parameter +float32 +38\.6 kB +of 1,201 parameters")
        self.assertRegex(text, r"step +\[\] +float32 +4\.8 kB +of 1,201 parameters")
        self.assertRegex(text, r"group 0: 1,201 parameters; lr=0\.5, betas=\(0\.9, 0\.999\)")
        self.assertNotIn("None", text)

    def test_equal_layers_are_one_entry(self) -> None:
        lines = self.inspected(self.root / "layers")
        self.assertLess(len(lines), 30)
        self.assertRegex("\n".join(lines), r"layers\.0\.\.399 +38\.4 kB +96 B each of 400\n    attn\.weight +\[4, 4\]")

    def test_a_layer_that_differs_is_an_entry_of_its_own(self) -> None:
        save(self.folder / "odd", Layers(9, odd=4))
        text = "\n".join(self.inspected(self.folder / "odd"))
        self.assertRegex(text, r"0\.\.3,5\.\.8 .*each of 8\n")
        self.assertRegex(text, r"\n    4  ")
        self.assertRegex(text, r"attn\.weight +\[8, 4\]")

    def test_all_has_a_line_for_every_tensor(self) -> None:
        lines = self.inspected(self.root / "layers", "--all")
        self.assertEqual(
            sum("  float32  " in line and "exp_avg" not in line and "step" not in line for line in lines), 1201
        )
        self.assertEqual(sum("layers.7.norm.bias: " in line for line in lines), 3)

    def test_without_state_and_without_an_optimizer(self) -> None:
        model = nn.Linear(3, 2)
        fsdp_optim.save(
            self.folder / "new",
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            options=fsdp_optim.SaveOptions(durable=False),
        )
        self.assertIn("optimizer SGD: no state yet", self.inspected(self.folder / "new"))
        fsdp_optim.save(self.folder / "weights", model, options=fsdp_optim.SaveOptions(durable=False))
        self.assertIn("no optimizer", self.inspected(self.folder / "weights"))
        lines = self.inspected(self.root / "plain.safetensors")
        self.assertIn("no optimizer", lines)
        self.assertRegex("\n".join(lines), r"format: +safetensors\n[\s\S]*model\.weight +\[2, 3\] +float32 +24 B")

    def test_numbers_and_objects_of_the_state(self) -> None:
        info = fsdp_optim.inspect(self.root / "source")
        self.assertEqual(info.state["0.weight"]["exp_avg"].shape, (512, 512))  # type: ignore[union-attr]
        self.assertEqual(info.nbytes, 12_644_480)
        state = {"0.weight": {"momentum": "1.5", "blocks": "OpaqueShards"}, "0.bias": {"momentum": "1.5"}}
        changed = type(info)(**{**vars(info), "state": state})
        text = "\n".join(shown(changed, folds=True))
        self.assertRegex(text, r"momentum +1\.5 +of 2 parameters")
        self.assertRegex(text, r"blocks +OpaqueShards +of 1 parameter\n")


class SizesTest(unittest.TestCase):
    def test_sizes_in_words(self) -> None:
        cases = {0: "0 B", 999: "999 B", 1000: "1 kB", 12_644_456: "12.6 MB", 10**9: "1 GB", 3 * 10**12: "3 TB"}
        for nbytes, text in cases.items():
            self.assertEqual(sized(nbytes), text)
        for text, nbytes in {"17": 17, "4GB": 4 * 10**9, "1.5k": 1500, "512MiB": 512 << 20, "2 TiB": 2 << 40}.items():
            self.assertEqual(size_of(text), nbytes)
