"""Files of each rank of fairscale, torch FSDP1, FSDP2, and as OLMo writes them: they load at any world size into any wrapper.

Everything is compared bit for bit with the same training without FSDP.
"""

from __future__ import annotations

import functools
import io
import itertools
import os
import re
import shutil
import tempfile
import unittest
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from fairscale.nn.data_parallel import FullyShardedDataParallel as FairscaleFSDP
from kit.cases import expand, those
from kit.compare import check_refused, check_same, sorted_state
from kit.experts import Experts
from kit.local_parts import local_of
from kit.models import Net, freeze_stem
from kit.optimizers import GROUPED, adam, sgd, two_groups
from kit.rank_files import (
    Buffered,
    Remembering,
    save_fairscale,
    save_olmo_local,
    save_sharded,
    values_of_others,
    weights_of,
)
from kit.trained import STEPS, Oracle, Trained
from kit.wrapping import cpu
from kit.wraps import in_fairscale, wrap_units
from parameterized import parameterized
from torch import nn

import fsdp_optim
from fsdp_optim import CheckpointError, StateError
from fsdp_optim.checkpoint.load import short_ranges
from fsdp_optim.testing import run_on_ranks

Save = Callable[[str, Any, Any], None]


def half_block(model: nn.Module) -> None:
    model.block[0].half()  # type: ignore[index]


def trainable(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam([param for param in params if param.requires_grad], lr=0.01)


def mixed(model: nn.Module) -> Any:
    """Some units flat, some not."""
    model.block[0] = in_fairscale(model.block[0])  # type: ignore[index, operator]
    model.stem = in_fairscale(model.stem)
    return in_fairscale(model, flatten_parameters=False)


def in_two_dtypes(model: nn.Module) -> Any:
    """Each unit with the dtype of its parameters, which fairscale wants to be told."""

    def wrap(module: nn.Module) -> Any:
        dtypes = {param.dtype for param in module.parameters(recurse=True)}
        return FairscaleFSDP(module, compute_dtype=torch.float16 if dtypes == {torch.float16} else torch.float32)

    return wrap_units(model, wrap)


def in_fairseq(folder: str, model: Any, optim: Any) -> None:
    save_fairscale(folder, "checkpoint_last", model, optim, "fsdp_metadata")


def in_metaseq(folder: str, model: Any, optim: Any) -> None:
    save_fairscale(folder, "checkpoint_last", model, optim)


CASES: Mapping[str, tuple[Any, Save, Any, Any]] = {
    # name: wrapper, save, make, prepare
    "fairseq": ("fairscale flat", in_fairseq, adam, None),
    "metaseq, momentum": ("fairscale flat", in_metaseq, sgd, None),
    "metaseq, not flat": ("fairscale non-flat", in_metaseq, adam, None),
    "metaseq, mixed": (mixed, in_metaseq, adam, None),
    "metaseq, frozen": ("fairscale flat", in_metaseq, adam, freeze_stem),
    "metaseq, groups": ("fairscale flat", in_metaseq, GROUPED["two groups"], None),
    "metaseq, dtypes": (in_two_dtypes, in_metaseq, adam, half_block),
    "FSDP1": ("FSDP1 flat", save_sharded, adam, None),
    "FSDP1 orig, momentum": ("FSDP1 orig", save_sharded, sgd, None),
    "FSDP1, frozen": ("FSDP1 flat", save_sharded, adam, freeze_stem),
    "FSDP1, groups": ("FSDP1 orig", save_sharded, GROUPED["two groups"], None),
    "FSDP1, dtypes": ("FSDP1 orig", save_sharded, sgd, half_block),
    "FSDP2, ids": ("FSDP2", functools.partial(save_sharded, kind="ids"), adam, None),
    "FSDP2, names": ("FSDP2", functools.partial(save_sharded, kind="names"), adam, None),
    "FSDP2, flattened": ("FSDP2", functools.partial(save_sharded, kind="flattened"), GROUPED["two groups"], None),
    "OLMo": ("FSDP1 orig", save_olmo_local, adam, None),
    "OLMo, frozen": ("FSDP1 orig", save_olmo_local, trainable, freeze_stem),
    "OLMo, groups": ("FSDP1 orig", save_olmo_local, GROUPED["two groups"], None),
    "OLMo, flat": ("FSDP1 flat", save_olmo_local, sgd, None),
    "OLMo, old torch": ("FSDP1 orig", functools.partial(save_olmo_local, before_2_1=True), adam, None),
}
ONLY_FOUR: Mapping[str, tuple[Any, Save, Any, Any]] = {
    "HSDP": ("HSDP", functools.partial(save_sharded, kind="names"), adam, None),
    "FSDP2 x TP": ("FSDP2 x TP", functools.partial(save_sharded, kind="names"), adam, None),
    "FSDP1 hybrid": ("hybrid", save_sharded, adam, None),
}
WRITTEN_BY = (1, 2, 3, 4)
AMBIGUOUS = ("metaseq, groups", 4)
"""Four flat parameters of two sizes in two groups: the sizes do not tell which is which."""


def model_of(case: str) -> type[nn.Module]:
    """A model with buffers; OLMo's local files have none."""
    return Net if "OLMo" in case else Buffered


def write(root: str, names: Sequence[str]) -> None:
    """These cases at this world size, each in a folder of its own."""
    from kit.wraps import fsdp1_hybrid_groups

    num = dist.get_world_size()
    with cpu():
        for name in names:
            wrap, save, make, prepare = {**CASES, **ONLY_FOUR}[name]
            folder = Path(root, f"{name}, {num}")
            folder.mkdir(exist_ok=True)
            wrapper = fsdp1_hybrid_groups if wrap == "hybrid" else wrap
            trained = Trained(wrapper, make, STEPS, model_of(name), prepare)
            trained.forget_gradients()
            remembering(trained.model, 7)
            save(str(folder), trained.model, trained.optim)
            dist.barrier()


def remembering(model: nn.Module, seen: int | None = None) -> list[int]:
    """The extra state of the layers; `seen`: it is set first."""
    layers = [module for module in model.modules() if isinstance(module, Remembering)]
    for layer in layers if seen is not None else ():
        layer.seen = int(seen or 0)
    return [layer.seen for layer in layers]


@functools.lru_cache(maxsize=1)
def root() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


def written_by(num: int, *names: str) -> str:
    """The folder with the files that so many ranks have written, of these cases at least."""
    new = [name for name in names if not Path(root().name, f"{name}, {num}").exists()]
    if new:
        run_on_ranks(write, num, root().name, new)
    return root().name


def check_loaded(path: str, wrap: Any, make: Any, prepare: Any, model: Any) -> None:
    """Load a checkpoint into a model in some wrapper, and compare everything with the unsharded training."""
    oracle = Oracle(make, STEPS, model, prepare)
    target = Trained(wrap, make, 0, model, prepare)
    with torch.no_grad():
        for tensor in (*target.params, *target.model.buffers()):
            local_of(tensor).zero_()
    restored = fsdp_optim.load(
        path, target.model, target.optim, options=fsdp_optim.LoadOptions(process_group=target.process_group)
    )
    check_same("missing", (restored.missing_keys, restored.unexpected_keys), (values_of_others(restored), ()))
    state = target.gather(None, "name")["state"]
    check_same("state", sorted_state(state), sorted_state(oracle.by_name()))
    values = torch.zeros(oracle.numbers._total, dtype=torch.float64)
    for name, param in oracle.model.named_parameters():
        start = oracle.numbers.start[name]
        values[start : start + param.numel()] = param.detach().double().reshape(-1)
    for param, index in zip(target.params, target.index, strict=True):
        real = index >= oracle.numbers.least
        check_same("weights", local_of(param).detach().double().reshape(-1)[real], values[index][real])
    buffers = {name.rpartition(".")[2]: buffer for name, buffer in target.model.named_buffers()}
    check_same("buffers", buffers, {name.rpartition(".")[2]: buffer for name, buffer in oracle.model.named_buffers()})
    check_same("extra state", remembering(target.model), [7] if model is Buffered else [])
    groups = [{k: v for k, v in g.items() if k != "params"} for g in target.optim.param_groups]
    check_same("groups", groups, [{k: v for k, v in g.items() if k != "params"} for g in oracle.optim.param_groups])


def load_all(folder: str, cases: list[tuple[str, int, str]]) -> list[str]:
    """The errors of loads of files, by case: name, ranks that wrote, wrapper."""
    failed = []
    with cpu():
        for name, num, wrap in cases:
            *_, make, prepare = {**CASES, **ONLY_FOUR}[name]
            try:
                check_loaded(str(Path(folder, f"{name}, {num}")), wrap, make, prepare, model_of(name))
            except Exception as error:
                failed.append(f"{name}, {num} ranks, into {wrap}: {type(error).__name__}: {error}")
    return failed


TARGETS = ("fairscale flat", "FSDP1 flat", "FSDP2", "plain")


def is_soon(num: int, ranks: int, part: int) -> bool:
    """Each case at one world size, written by one rank more: whose files they are does not matter to another case's."""
    return ranks == num + 1 and part == num % 3 and num < 3


class RankFilesTest(unittest.TestCase):
    @expand(*those(itertools.product((1, 2, 3), WRITTEN_BY, range(3)), is_soon))
    def test_files_of_each_rank_load_at_any_world_size_into_any_wrapper(self, num: int, ranks: int, part: int) -> None:
        cases = []
        for index, name in enumerate((*CASES, *(ONLY_FOUR if ranks == 4 else ()))):
            if (name, ranks) == AMBIGUOUS or (index % 3 != part and name not in ONLY_FOUR):
                continue
            wrap = TARGETS[(index // 3 + num + part) % len(TARGETS)]
            wrap = "FSDP2" if "dtypes" in name and wrap.startswith("fairscale") else wrap
            cases.append((name, ranks, wrap))
        written_by(ranks, *(name for name, *_ in cases))
        failed = run_on_ranks(load_all, num, root().name, cases)
        errors = sorted({error for of_rank in failed for error in of_rank})
        self.assertFalse(errors, "\n".join(errors))


# ------------------------------------------------------------------------------------------- what is read


def nbytes_read(path: str, wrap: str) -> int:
    """The bytes of weights, buffers and state that this rank reads, without the short pieces between them that come along."""
    with cpu(), mock.patch.object(short_ranges, "_GAP_NBYTES", 0):
        target = Trained(wrap, adam, 0, Buffered)
        return fsdp_optim.load(path, target.model, target.optim).nbytes


class ReadingTest(unittest.TestCase):
    @parameterized.expand([("fairseq",), ("FSDP1",), ("FSDP2, names",)])
    def test_every_element_is_read_once_and_padding_never(self, name: str) -> None:
        read = run_on_ranks(nbytes_read, 2, f"{written_by(3, name)}/{name}, 3", "FSDP2")
        model = Buffered()
        numels = sum(param.numel() for param in model.parameters())
        buffers = sum(buffer.numel() * buffer.itemsize for buffer in model.buffers())
        self.assertEqual(sum(read), 3 * 4 * numels + buffers)
        self.assertLess(max(read), sum(read))

    def test_the_values_of_the_trainer_are_extras(self) -> None:
        model = Buffered()
        restored = fsdp_optim.load(
            f"{written_by(2, 'metaseq, momentum')}/metaseq, momentum, 2/checkpoint_last.pt", model
        )
        check_same("cfg", restored.state["cfg"], {"optimizer": {"lr": [0.01]}})
        check_same(
            "rng",
            [extras["extra_state"]["rng"] for extras in restored.all_ranks],
            [torch.arange(3), torch.arange(3) + 1],
        )
        self.assertEqual((restored.world_size, restored.step), (2, 3))

    def test_extras_of_other_classes_are_withheld_unless_pickles_are_allowed(self) -> None:
        path = f"{written_by(2, 'fairseq')}/fairseq, 2"
        with self.assertRaisesRegex(CheckpointError, "Namespace"):
            fsdp_optim.load(path, Buffered()).state["args"]
        restored = fsdp_optim.load(path, Buffered(), options=fsdp_optim.LoadOptions(allow_pickle=True))
        self.assertEqual([extras["args"].arch for extras in restored.all_ranks], ["net of rank 0", "net of rank 1"])

    def test_one_of_several_checkpoints_in_a_folder_is_selected_by_its_path(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for stem in ("checkpoint_last", "checkpoint_best"):
                for path in Path(written_by(2, "fairseq"), "fairseq, 2").iterdir():
                    shutil.copy(path, Path(folder, path.name.replace("checkpoint_last", stem)))
            with self.assertRaisesRegex(
                CheckpointError, r"several checkpoints, checkpoint_best\.pt, checkpoint_last\.pt"
            ):
                fsdp_optim.load(folder, Buffered())
            for name in ("checkpoint_best.pt", "checkpoint_last-shard0.pt", "checkpoint_last-shard1.pt"):
                self.assertFalse(fsdp_optim.load(f"{folder}/{name}", Buffered()).missing_keys)

    def test_ids_that_sizes_do_not_tell_are_refused_and_weights_are_loaded(self) -> None:
        name, num = AMBIGUOUS
        path, model = f"{written_by(num, name)}/{name}, {num}", Buffered()
        with self.assertRaisesRegex(StateError, r"1 \+ 3 parameters, the model 4 flat ones"):
            fsdp_optim.load(path, model, two_groups(model))
        fsdp_optim.load(path, model)
        check_same("weights", weights_of(model), weights_of(Oracle(GROUPED["two groups"], STEPS, Buffered).model))

    def test_state_of_unknown_classes_is_refused_and_weights_are_loaded(self) -> None:
        for name, file in {**KINDS, "OLMo": "optim/rank{}.pt"}.items():
            with tempfile.TemporaryDirectory() as folder:
                shutil.copytree(f"{written_by(2, name)}/{name}, 2", folder, dirs_exist_ok=True)
                for rank in (0, 1):
                    spoil(Path(folder, file.format(rank)))
                model = model_of(name)()
                with self.assertRaisesRegex(StateError, "Mystery"):
                    fsdp_optim.load(folder, model, adam(model.parameters()))
                self.assertFalse(fsdp_optim.load(folder, model).missing_keys)


class Mystery:
    """A class that no reader knows."""


def spoil(path: Path) -> None:
    """Put an object of an unknown class into an optimizer's param groups, without torch, which needs process groups for it."""
    data = path.read_bytes()
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        for info in old.infolist():
            content = old.read(info)
            if info.filename.endswith("data.pkl"):
                # betas is a tuple of two floats; in its place comes an object: GLOBAL, EMPTY_TUPLE, NEWOBJ.
                key = b"X\x05\x00\x00\x00betas"
                at = content.index(key) + len(key)
                at += 2 if content[at : at + 1] == b"q" else 5  # BINPUT or LONG_BINPUT
                end = content.index(b"\x86", at + 18) + 1
                content = content[:at] + b"ctest_rank_files\nMystery\n)\x81" + content[end:]
            new.writestr(info.filename, content)
    path.write_bytes(out.getvalue())


# ------------------------------------------------------------------------------------------- damage


KINDS = {
    "fairseq": "checkpoint_last-shard{}.pt",
    "FSDP1": "rank{}.pt",
    "FSDP2, names": "rank{}.pt",
    "OLMo": "model/rank{}.pt",
}


class Bomb:
    """Runs a command when it is unpickled."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._path}",)


def write_later(folder: str) -> None:
    """The same cases after one step more."""
    with cpu():
        for name in KINDS:
            wrap, save, make, prepare = CASES[name]
            Path(folder, name).mkdir(exist_ok=True)
            trained = Trained(wrap, make, STEPS + 1, model_of(name), prepare)
            trained.forget_gradients()
            save(str(Path(folder, name)), trained.model, trained.optim)
            dist.barrier()


def attacked(name: str, path: str, rank: int, later: str) -> Mapping[str, tuple[Callable[[], Any], tuple[str, ...]]]:
    """By name of an attack: what one process does to the files of two ranks, and words of the error."""
    file = KINDS[name].format(rank)
    target, other = Path(path, file), Path(path, KINDS[name].format(1 - rank))

    def swap() -> None:
        first, second = target.read_bytes(), other.read_bytes()
        target.write_bytes(second)
        other.write_bytes(first)

    def flip() -> None:
        data = bytearray(target.read_bytes())
        at = data.index(b"\x80\x02}")  # the beginning of the pickle
        data[at : at + 10] = bytes(10)
        target.write_bytes(data)

    def plant() -> None:
        torch.save({"model": Bomb(f"{path}/exploded")}, target)

    def mix() -> None:
        for half in ("model", "optim") if name == "OLMo" else ("",):
            name_of_half = file.replace("model", half)
            shutil.copy(Path(later, name, name_of_half), Path(path, name_of_half))

    # The highest rank's file is not missed by its number, but by elements or by what the other files say.
    return {
        "missing": (target.unlink, ("file",)),
        "cut short": (lambda: target.write_bytes(target.read_bytes()[:-200]), (file,)),
        "changed": (flip, (file,)),
        "empty": (lambda: target.write_bytes(b""), (file,)),
        "hostile": (plant, (file,)),
        "of another save": (mix, (f"rank{1}.pt" if name != "fairseq" else KINDS[name].format(1), "not of one save")),
        **({} if name == "OLMo" else {"swapped": (swap, ("renamed",))}),
    }


def attack(root: str, copy: str, later: str) -> list[tuple[str, str, tuple[str, str], bool]]:
    """For every kind and attack: its name and arguments, this rank's error, and whether model and optimizer are unchanged."""
    outcomes = []
    for name in KINDS:
        target = Trained("FSDP2", adam, 0, model_of(name))  # one for all, because nothing may change it
        for rank in (0, 1) if name == "fairseq" else (1,):
            for what in attacked(name, copy, rank, later):
                if dist.get_rank() == 0:
                    shutil.rmtree(copy, ignore_errors=True)
                    shutil.copytree(Path(root, f"{name}, 2"), copy)
                    attacked(name, copy, rank, later)[what][0]()
                dist.barrier()
                before = [local_of(param).clone() for param in target.params]
                path = f"{copy}/{KINDS[name].format(1 - rank)}" if name == "fairseq" else copy
                try:
                    fsdp_optim.load(path, target.model, target.optim)
                    error = ("", "")
                except Exception as raised:
                    error = (type(raised).__name__, str(raised))
                same = all(map(torch.equal, before, map(local_of, target.params))) and not target.optim.state
                outcomes.append((f"{name}, rank {rank}, {what}", (name, rank, what), error, same))
                dist.barrier()
    return outcomes


class DamageTest(unittest.TestCase):
    def test_damage_is_an_error_on_all_ranks_that_names_the_file_and_changes_nothing(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            later, copy = f"{folder}/later", f"{folder}/copy"
            Path(later).mkdir()
            run_on_ranks(write_later, 2, later)
            by_rank = run_on_ranks(attack, 2, written_by(2, *KINDS), copy, later)
            self.assertFalse(list(Path(folder).rglob("exploded")))
            for cases in zip(*by_rank, strict=True):
                what, (name, rank, kind), *_ = cases[0]
                words = attacked(name, copy, rank, later)[kind][1]
                with self.subTest(what):
                    check_refused(what, [error for _, _, error, _ in cases], "CheckpointError", *words)
                    self.assertTrue(all(same for *_, same in cases), what)


# ------------------------------------------------------------------------------------------- experts


def save_experts(folder: str, kind: str) -> None:
    """Four ranks, of which two share an expert each, which both pairs call experts.0."""
    from kit.experts import train_experts

    pair = dist.get_rank() // 2
    ranks = (2 * pair, 2 * pair + 1)
    trained = train_experts(kind, (pair,), ranks, Oracle(adam, STEPS, functools.partial(Experts, 2)), STEPS)
    trained.forget_gradients()
    save_sharded(folder, trained.model, trained.optim, "names")


def load_experts(folder: str, kind: str) -> None:
    """Four ranks again, with the experts placed as they were, each under the name of the lowest rank that had it."""
    from kit.experts import global_name, train_experts

    oracle = Oracle(adam, STEPS, functools.partial(Experts, 2))
    pair = dist.get_rank() // 2
    trained = train_experts(kind, (pair,), (2 * pair, 2 * pair + 1), oracle, 0)

    def name_of(fqn: str, rank: int) -> str:
        return f"{fqn}@{rank}" if "experts" in fqn else fqn

    fsdp_optim.load(folder, trained.model, trained.optim, options=fsdp_optim.LoadOptions(name_of=name_of))
    full = trained.gather(None, "name", name_of=name_of, collect="all")
    wanted = {wanted_name(name): state for name, state in oracle.by_name().items()}
    check_same(f"{kind}, state", sorted_state(full["state"]), sorted_state(wanted))
    check_same(f"{kind}, a global name", global_name((1,), "experts.0.weight"), "experts.1.weight")


def wanted_name(fqn: str) -> str:
    return fqn.replace("experts.0.", "experts.0.").replace("experts.1.", "experts.0.") + (
        {"0": "@0", "1": "@2"}[fqn.split(".")[1]] if "experts" in fqn else ""
    )


def save_own_experts(folder: str) -> None:
    """Two ranks with a fairscale expert each, of no process group but their own."""
    from kit.experts import OwnExperts

    class Mine(OwnExperts):
        pass

    Mine.mine = (0,)

    oracle = Oracle(adam, STEPS, functools.partial(Experts, 2))
    with cpu():
        trained = Trained.__new__(Trained)
        model = Mine()
        for name, param in model.named_parameters():
            start = oracle.numbers.start[name.replace("experts.0.", f"experts.{dist.get_rank()}.")]
            param.data = torch.arange(start, start + param.numel(), dtype=torch.float32).reshape(param.shape)
        groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        own = groups[dist.get_rank()]
        model.experts[0] = FairscaleFSDP(model.experts[0], process_group=own, no_broadcast_optim_state=True)
        trained.numbers = oracle.numbers
        trained.adopt(FairscaleFSDP(model), adam)
        trained.step(range(STEPS))
        trained.forget_gradients()
        save_fairscale(folder, "moe", trained.model, trained.optim)


class ExpertsTest(unittest.TestCase):
    """Names that mean another parameter on another rank get the rank's number, so that nothing is mixed up."""

    def check_whole(self, folder: str, rename: Mapping[str, str]) -> None:
        """Load into the whole model, in one process without ranks."""
        oracle = Oracle(adam, STEPS, functools.partial(Experts, 2))
        model = Experts(2)
        optim = adam(model.parameters())

        def renamed(name: str) -> str:
            return re.sub(r"experts\.0\.(\w+)@(\d)", lambda match: f"experts.{rename[match[2]]}.{match[1]}", name)

        fsdp_optim.load(folder, model, optim, options=fsdp_optim.LoadOptions(rename=renamed))
        check_same("weights", weights_of(model), weights_of(oracle.model))
        state = {name: dict(optim.state[param]) for name, param in model.named_parameters()}
        check_same("state", sorted_state(state), sorted_state(oracle.by_name()))

    @parameterized.expand([("FSDP1",), ("FSDP1 orig",), ("FSDP2",)])
    def test_experts_on_groups_of_ranks(self, kind: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            run_on_ranks(save_experts, 4, folder, kind)
            self.check_whole(folder, {"0": "0", "2": "1"})
            run_on_ranks(load_experts, 4, folder, kind)

    def test_fairscale_experts_of_each_rank(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            run_on_ranks(save_own_experts, 2, folder)
            self.check_whole(folder, {"0": "0", "1": "1"})


if __name__ == "__main__":
    unittest.main()
