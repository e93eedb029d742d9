"""The frame of the command line: what help imports, suggestions, exit codes, the options in errors, completion."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import unittest
from importlib import import_module

import click
from parameterized import parameterized

import fsdp_optim
from fsdp_optim import saying
from fsdp_optim.cli import units
from fsdp_optim.cli.app import COMMANDS, COMPLETION_VARIABLE, group, main
from fsdp_optim.cli.failing import exit_code_of, with_flags
from fsdp_optim.cli.options import DEFAULT_MEMORY, LEAST_MEMORY
from fsdp_optim.errors import CheckpointError, StateError, wrong_use
from fsdp_optim.options import CONVERT_NBYTES, LEAST_CONVERT_NBYTES
from website import commands

HEAVY = {"torch", "numpy", "rich", "tqdm", "msgspec", "xxhash"}


def called(*arguments: str) -> tuple[int, str, str]:
    """The exit code, the standard output and the standard error of one command."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(list(arguments))
    return code, out.getvalue(), err.getvalue()


class FrameTest(unittest.TestCase):
    @parameterized.expand(
        [
            (1, "1 tensor"),
            (1163, "1,163 tensors"),
            (999_999, "999,999 tensors"),
            (1_300_000, "1.3 M tensors"),
            (999_999_999, "1 G tensors"),
            (70_553_706_496, "70.55 G tensors"),
        ]
    )
    def test_numbers_in_words(self, number: int, words: str) -> None:
        self.assertEqual(saying.counted(number, "tensor"), words)
        self.assertIs(units.counted, saying.counted)

    @parameterized.expand([(["--help"],), (["--version"],), (["convert", "--help"],), (["no-such-command"],), ([],)])
    def test_help_and_version_import_nothing_heavy(self, arguments: list[str]) -> None:
        code = f"import sys\nfrom fsdp_optim.cli.app import main\nmain({arguments!r})\n"
        code += "print(*{name.split('.')[0] for name in sys.modules}, file=sys.stderr)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=90)
        loaded = set(done.stderr.splitlines()[-1].split())
        self.assertIn("click", loaded)
        self.assertEqual(loaded & HEAVY, set())

    @parameterized.expand(sorted(COMMANDS))
    def test_every_command_of_the_table(self, name: str) -> None:
        """It has the name of the table and a help of its own, and importing it imports no torch."""
        command = import_module(COMMANDS[name][0]).command
        self.assertIsInstance(command, click.Command)
        self.assertEqual(command.name, name)
        code, out, err = called(name, "--help")
        self.assertEqual((code, err), (0, ""))
        self.assertIn(f"Usage: fsdp-optim {name}", out)
        for param in command.params:
            if isinstance(param, click.Option):
                self.assertTrue(param.help, f"{name}: {param.opts} has no help")
        script = f"import sys, {COMMANDS[name][0]}\nassert 'torch' not in sys.modules"
        subprocess.run([sys.executable, "-c", script], check=True, timeout=90)

    @parameterized.expand([(name,) for name in COMMANDS if name != "completion"])
    def test_every_command_reports_to_programs(self, name: str) -> None:
        command = commands.group.get_command(click.Context(commands.group), name)
        assert command is not None
        options = {flag for param in command.params for flag in param.opts}
        self.assertLessEqual({"--json", "--storage-option"}, options)  # and every path may be a URL

    def test_help_lists_all_commands(self) -> None:
        code, out, err = called("--help")
        self.assertEqual((code, err), (0, ""))
        for name, (_, text) in COMMANDS.items():
            self.assertIn(name, out)
            self.assertIn(text, " ".join(out.split()))

    def test_the_page_about_the_commands(self) -> None:
        """docs/cli.md is what the commands say; `python -m website.commands` writes it."""
        self.assertEqual(commands.PAGE.read_text(), commands.page())

    def test_the_least_memory_is_that_of_the_library(self) -> None:
        self.assertEqual((DEFAULT_MEMORY, LEAST_MEMORY), (CONVERT_NBYTES, LEAST_CONVERT_NBYTES))

    def test_the_version(self) -> None:
        self.assertEqual(called("--version"), (0, f"fsdp-optim {fsdp_optim.__version__}\n", ""))

    def test_did_you_mean(self) -> None:
        code, out, err = called("inspekt", "x")
        self.assertEqual((code, out), (2, ""))
        self.assertRegex(err, r"\Afsdp-optim: there is no command 'inspekt': did you mean inspect\?[^\n]*\n\Z")
        code, _, err = called("convert", "a", "b", "--format", "safetensor")
        self.assertEqual(code, 2)
        self.assertIn("did you mean safetensors?", err)
        code, _, err = called("convert", "a", "b", "--overwite")
        self.assertEqual(code, 2)
        self.assertIn("--overwrite", err)

    def test_no_command(self) -> None:
        code, out, err = called()
        self.assertEqual((code, out), (2, ""))
        self.assertIn("Commands:", err)

    def test_exit_codes_of_errors(self) -> None:
        self.assertEqual(exit_code_of(CheckpointError("damaged")), 1)
        self.assertEqual(exit_code_of(wrong_use("taken")), 2)
        self.assertEqual(exit_code_of(StateError("no names")), 2)

    def test_arguments_of_python_are_options_of_the_command(self) -> None:
        convert = import_module(COMMANDS["convert"][0]).command
        inspect = import_module(COMMANDS["inspect"][0]).command
        for text, wanted in {
            "a: already exists: give overwrite=True": "a: already exists: give --overwrite",
            "a pickle: say allow_pickle=True to run it": "a pickle: say --allow-pickle to run it",
            "bucket_nbytes must be at least 16 bytes": "--memory must be at least 16 bytes",
            "give param_names=... or model=...": "give --names or model=...",
            "give world_size=8": "give --world-size 8",
            "storage_options must be a dict": "--storage-option must be a dict",
            "give durable=False": "give --not-durable",
            "step=7 is not there": "step=7 is not there",
            'give units={"": [...]}: for each': 'give --units with {"": [...]}: for each',
            "give param_names=[...], their FQNs": "give --names, their FQNs",
            "/run/format=dcp/names=x: is not there": "/run/format=dcp/names=x: is not there",
        }.items():
            self.assertEqual(with_flags(text, convert), wanted)
        self.assertEqual(with_flags("say overwrite=True", inspect), "say overwrite=True")
        self.assertEqual(with_flags("say overwrite=True", None), "say overwrite=True")

    @parameterized.expand([(name,) for name in COMMANDS if name != "completion"])
    def test_paths_are_completed(self, name: str) -> None:
        command = group.get_command(click.Context(group), name)
        assert command is not None
        context = click.Context(command)
        paths = {
            "FILE",
            "OUT",
            "SRC",
            "DST",
            "A",
            "B",
            "CKPT",
            "PATH",
            "ROOT",
            "FOLDER",
            "SOURCES",
            "BASE",
            "ADAPTER",
        }
        known = [param for param in command.params if (param.metavar or str(param.name).upper()) in paths]
        self.assertTrue(known)
        for param in known:
            (item,) = param.shell_complete(context, "run/st")
            self.assertEqual((item.value, item.type), ("run/st", "file"), param.name)

    @parameterized.expand([("bash",), ("zsh",), ("fish",)])
    def test_completion(self, shell: str) -> None:
        code, out, err = called("completion", shell)
        self.assertEqual((code, err), (0, ""))
        self.assertIn(COMPLETION_VARIABLE, out)
        asked = {COMPLETION_VARIABLE: f"{shell}_complete", "COMP_WORDS": "fsdp-optim ver"}
        asked["COMP_CWORD"] = "ver" if shell == "fish" else "1"
        program = [sys.executable, "-m", "fsdp_optim"]
        environment = {**os.environ, **asked}
        done = subprocess.run(program, capture_output=True, text=True, check=True, timeout=90, env=environment)
        self.assertIn("verify", done.stdout)
        self.assertNotIn("convert", done.stdout)
