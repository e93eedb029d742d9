"""Several models in one checkpoint: each in a folder of its own, in any wrapper, loaded together, in part and alone."""

from __future__ import annotations

import functools
import itertools
import json
import shutil
import tempfile
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from kit.checkpoint_damage import flip
from kit.checkpoint_format import check_folder
from kit.compare import check_same, error_text, refused, refused_on_ranks
from kit.several import TRAINED, Net, content, models, optimizer, plain, train, wanted, wrapped
from safetensors.torch import load_file
from torch import nn

import fsdp_optim
from fsdp_optim.plugins import Folder, OwnFormat
from fsdp_optim.testing import run_on_ranks

QUIET = fsdp_optim.SaveOptions(durable=False, progress=False)
COMPARE = fsdp_optim.LoadOptions(compare=True, progress=False)
WORLD = 4
SAVED = {"actor": "FSDP2", "critic": "DDP", "reference": "plain", "ema": "HSDP"}
OTHER = {"actor": "DDP", "critic": "FSDP2", "reference": "FSDP2", "ema": "plain"}


def save(path: Path, live: Any, optims: Any, **more: Any) -> fsdp_optim.SaveResult:
    return fsdp_optim.save(path, live, optims, **{"options": QUIET, **more})


def check_all(what: str, live: Any, optims: Any) -> None:
    for name, expected in wanted(tuple(live)).items():
        if name not in optims:
            expected = {"weights": expected["weights"]}
        check_same(f"{what}: {name}", content(live[name], optims.get(name)), expected)


# ------------------------------------------------------------------------------------------- cases on ranks


def saved_and_loaded(root: Path) -> None:
    live, optims = models(SAVED, filled=True)
    check_all("the training has the oracle's values", live, optims)
    for name, more in {
        "whole": {},
        "split": {"max_file_size": 600},
        "own files": {"strategy": "per_rank_files"},
    }.items():
        options = fsdp_optim.SaveOptions(durable=False, progress=False, **more)
        save(root / name, live, optims, step=7, options=options, state={"n": 3, "tree": {"x": torch.ones(4)}})
        if dist.get_rank() == 0:
            check_folder(root / name)
        for ways in (SAVED, OTHER):
            into, their = models(ways, filled=False)
            result = fsdp_optim.load(
                root / name, into, their, state={"n": 0, "tree": {"x": torch.zeros(4)}}, options=COMPARE
            )
            check_all(name, into, their)
            check_same(
                "the rest",
                (result.step, result.state["n"], result.missing_keys, result.unexpected_keys),
                (7, 3, (), ()),
            )
    save(root / "dcp", live, optims, format="dcp")
    into, their = models(OTHER, filled=False)
    fsdp_optim.load(root / "dcp", into, their, options=COMPARE)
    check_all("dcp", into, their)


def parts_of_it(root: Path) -> None:
    path = root.parent / "saved_and_loaded" / "whole"
    for names in (("critic",), ("ema", "actor")):
        into, their = models({name: OTHER[name] for name in names}, filled=False)
        result = fsdp_optim.load(path, into, their, options=COMPARE)
        check_all(f"some: {names}", into, their)
        told = str(result.receipt) if dist.get_rank() == 0 else f"({', '.join(sorted(names))}; not "
        check_same("the line", f"({', '.join(sorted(names))}; not " in told, True)
    into, their = models(OTHER, filled=False)
    actor_alone = {"actor": their["actor"]}
    fsdp_optim.load(path, into, actor_alone, options=COMPARE)
    check_all("one optimizer", into, actor_alone)
    check_same("the other", their["critic"].state_dict()["state"], {})
    fsdp_optim.load(path, into, None, options=COMPARE)
    for name, how in OTHER.items():
        model = wrapped(plain(name, False), how)
        optim = optimizer(name, model) if name in TRAINED else None
        fsdp_optim.load(path / name, model, optim, options=COMPARE)
        check_all("alone", {name: model}, {name: optim} if optim is not None else {})
    critic = wrapped(plain("critic", False), "FSDP2")
    fsdp_optim.load(path / "critic", {"old": critic}, options=fsdp_optim.LoadOptions(rename={"": "old."}))
    check_all("renamed", {"critic": critic}, {})


def one_model_becomes_several(root: Path) -> None:
    """A one-model checkpoint into one of several, and one of several in one model."""
    base = wrapped(plain("actor"), "FSDP2")
    save(root / "base", base, None)
    into, _ = models({"actor": "FSDP2", "ema": "DDP"}, filled=False)
    for model in into.values():
        fsdp_optim.load(root / "base", model)
        check_same("the base", content(model, None), content(plain("actor"), None))
    both = nn.ModuleDict({"actor": plain("actor", False), "ema": plain("ema", False)})
    fsdp_optim.load(root.parent / "saved_and_loaded" / "whole", both, strict=False)
    check_same("as one model", content(both["ema"], None), content(plain("ema"), None))


def what_is_refused(root: Path) -> None:
    path = root.parent / "saved_and_loaded" / "whole"
    live, optims = models(SAVED, filled=True)
    shared = plain("actor")
    tied = {"actor": shared, "critic": nn.Sequential(shared.inner, nn.Linear(6, 1))}
    before = content(live["actor"], None)
    for what, call, kind, words in (
        ("a name", lambda: save(root, {"a.b": live["actor"]}, None), "WrapperError", ["'a.b'", "folder"]),
        ("extra", lambda: save(root, {"extra": live["actor"]}, None), "WrapperError", ["'extra'"]),
        ("of a wrapper", lambda: save(root, {"_fpw_module": live["actor"]}, None), "WrapperError", ["'_fpw_module'"]),
        ("no str", lambda: save(root, {1: live["actor"]}, None), "WrapperError", ["1 cannot be the name"]),
        (
            "case",
            lambda: save(root, {"A": live["actor"], "a": live["ema"]}, None),
            "WrapperError",
            ["upper and lower case"],
        ),
        ("nothing", lambda: save(root, {}, None), "WrapperError", ["empty dict"]),
        ("no model", lambda: save(root, {"actor": 3}, None), "WrapperError", ["the model 'actor'", "not an int"]),
        ("state dict", lambda: save(root, plain("actor").state_dict(), None), "WrapperError", ["not its state_dict()"]),
        (
            "shared",
            lambda: save(root, tied, None),
            "WrapperError",
            ["actor.inner.weight and critic.0.weight", "one tensor"],
        ),
        (
            "twice",
            lambda: save(root, {"a": shared, "b": shared}, None),
            "WrapperError",
            ["a.seen and b.seen"],
        ),
        (
            "an optimizer of none",
            lambda: save(root, live, {"x": optims["actor"]}),
            "StateError",
            ["'x'", "actor, critic"],
        ),
        (
            "no optimizer",
            lambda: save(root, live, {"actor": 3}),
            "StateError",
            ["the optimizer of 'actor'", "not an int"],
        ),
        (
            "another's optimizer",
            lambda: save(root, live, {"actor": optims["critic"], "critic": optims["actor"]}),
            "WrapperError",
            ["the optimizer of 'actor'", "another model"],
        ),
        (
            "missing",
            lambda: fsdp_optim.load(path, {"reward": live["actor"]}),
            "StateError",
            ["no model 'reward'", "actor, critic"],
        ),
        (
            "no name",
            lambda: fsdp_optim.load(path, plain("actor")),
            "StateError",
            ["the models actor, critic", "model={'actor': model}"],
        ),
        (
            "one model",
            lambda: fsdp_optim.load(root.parent / "one_model_becomes_several" / "base", {"actor": live["actor"]}),
            "StateError",
            ["one model, without a name"],
        ),
        (
            "names of none",
            lambda: save(root, live, None, options=fsdp_optim.SaveOptions(rename={"actor.": "x."})),
            "CheckpointError",
            ["x.inner", "none of its models"],
        ),
        (
            "gather",
            lambda: fsdp_optim.gather_full_model_state_dict(live),
            "WrapperError",
            ["torch.nn.ModuleDict(models)"],
        ),
    ):
        refused_on_ranks(what, call, kind, *words)
        check_same(f"{what}: nothing is there", root.exists(), False)
    mixed = {"actor": live["actor"]} if dist.get_rank() else {"critic": live["critic"]}
    refused_on_ranks("ranks differ", lambda: save(root, mixed, None), "RankError", "actor", "critic")
    check_same("untouched", content(live["actor"], None), before)
    into, their = models(SAVED, filled=False)
    more = {**into, "reward": Net(3, 2)}
    result = fsdp_optim.load(path, more, their, strict=False, options=COMPARE)
    check_same("missing", {name.partition(".")[0] for name in result.missing_keys}, {"reward"})
    check_all("the others", into, their)


def a_failing_rank(root: Path) -> None:
    """Ranks cannot write a file of one model: nothing is there, and the checkpoint that was there stays whole."""
    live, optims = models(SAVED, filled=True)
    save(root / "c", live, optims, step=1)
    before = {name: content(model, None) for name, model in live.items()}
    for name in optims:
        train(live[name], optims[name], 2)
    real = Folder.join

    def joined(self: Folder, *args: Any, **more: Any) -> Any:
        writer = real(self, *args, **more)
        write = writer.write

        def broken(name: str, pieces: Any, offset: int) -> None:
            if name.startswith("ema/"):
                raise OSError(28, "No space left on device")
            write(name, pieces, offset)

        writer.write = broken
        return writer

    for call in (fsdp_optim.save, lambda *args, **more: fsdp_optim.async_save(*args, **more).wait()):
        with mock.patch.object(Folder, "join", joined):
            kind, _ = error_text(
                lambda call=call: call(root / "c", live, optims, step=2, overwrite=True, options=QUIET)
            )
        check_same("the class", kind != "", True)
        into, their = models(OTHER, filled=False)
        result = fsdp_optim.load(root / "c", into, their, options=COMPARE)
        check_same("step", result.step, 1)
        check_same("all are the old ones", {name: content(model, None) for name, model in into.items()}, before)
    fsdp_optim.async_save(root / "c", live, optims, step=3, overwrite=True, options=QUIET).wait()
    into, their = models(OTHER, filled=False)
    check_same("step", fsdp_optim.load(root / "c", into, their, options=COMPARE).step, 3)
    check_same("new", content(into["actor"], their["actor"]), content(live["actor"], optims["actor"]))


def managed(root: Path) -> None:
    live, optims = models(SAVED, filled=True)
    with fsdp_optim.CheckpointManager(
        root,
        live,
        optims,
        every=1,
        keep_last=2,
        keep_optim_last=1,
        options=fsdp_optim.ManagerOptions(durable=False),
    ) as manager:
        check_same("nothing", manager.resume(), 0)
        for step in (1, 2, 3):
            train(live["critic"], optims["critic"], 1)
            manager.step(step)
    into, their = models(OTHER, filled=False)
    with fsdp_optim.CheckpointManager(root, into, their, every=1) as manager:
        check_same("step", manager.resume(), 3)
    for name in into:
        check_same(name, content(into[name], their.get(name)), content(live[name], optims.get(name)))
    into, their = models(SAVED, filled=False)
    result = fsdp_optim.resume(root, into, their)
    check_same("resume", result is not None and result.step, 3)
    check_same("actor", content(into["actor"], their["actor"]), content(live["actor"], optims["actor"]))
    dist.barrier()
    if dist.get_rank() == 0:
        check_same("kept", sorted(path.name for path in root.iterdir()), ["step-00000002", "step-00000003"])
        thin = root / "step-00000002"
        check_same(
            "thin",
            sorted(path.name for path in (thin / "critic").iterdir()),
            ["model.safetensors", "model.safetensors.sums"],
        )
        fsdp_optim.verify(thin, progress=False)
        check_same("latest", fsdp_optim.latest(root), root / "step-00000003")
    dist.barrier()


def keys_that_differ(root: Path) -> None:
    """Each optimizer keeps the other keys of its own dict, and its state that belongs to no parameter."""

    class Counting(torch.optim.SGD):
        calls = 0

        def state_dict(self) -> dict[str, Any]:
            saved = super().state_dict()
            saved["state"]["k"] = {"calls": self.calls}
            return saved | {"scale": float(self.calls)}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.calls = state_dict["state"].pop("k")["calls"]
            self.scale = state_dict.pop("scale")
            super().load_state_dict(state_dict)

    def build(calls: tuple[int, int]) -> tuple[Any, Any]:
        live = {"a": wrapped(plain("actor"), "FSDP2"), "b": wrapped(plain("critic"), "DDP")}
        optims = {name: Counting(model.parameters(), lr=0.5) for name, model in live.items()}
        for optim, number in zip(optims.values(), calls, strict=True):
            optim.calls = number
        return live, optims

    save(root / "c", *build((3, 8)))
    for names in (("a", "b"), ("b",)):
        live, optims = build((0, 0))
        fsdp_optim.load(root / "c", {name: live[name] for name in names}, {name: optims[name] for name in names})
        check_same(
            "calls", [(optims[name].calls, optims[name].scale) for name in names], [(3, 3.0), (8, 8.0)][-len(names) :]
        )
    live, optims = build((0, 0))
    fsdp_optim.load(root / "c" / "a", live["a"], optims["a"])
    check_same("alone", optims["a"].calls, 3)


def on_ranks(root: Path) -> None:
    for case in (
        saved_and_loaded,
        parts_of_it,
        one_model_becomes_several,
        what_is_refused,
        a_failing_rank,
        managed,
        keys_that_differ,
    ):
        case(root / case.__name__)


def at_another_world_size(root: Path) -> None:
    for name, ways in itertools.product(("whole", "split", "own files", "dcp"), (SAVED, OTHER)):
        into, their = models(ways, filled=False)
        fsdp_optim.load(root / "saved_and_loaded" / name, into, their, options=COMPARE)
        check_all(name, into, their)
    live, optims = models(OTHER, filled=True)
    save(root / "of two", live, optims)


def loaded_by_four(root: Path) -> None:
    into, their = models(SAVED, filled=False)
    fsdp_optim.load(root / "of two", into, their, options=COMPARE)
    check_all("of two", into, their)


# ------------------------------------------------------------------------------------------- one process


class SeveralModelsTest(unittest.TestCase):
    def setUp(self) -> None:
        self.root = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.root)
        self.live, self.optims = models(dict.fromkeys(SAVED, "plain"), filled=True)

    def test_on_ranks(self) -> None:
        run_on_ranks(on_ranks, WORLD, self.root)
        run_on_ranks(at_another_world_size, 2, self.root)
        run_on_ranks(loaded_by_four, WORLD, self.root)
        into, their = models(dict.fromkeys(SAVED, "plain"), filled=False)
        fsdp_optim.load(self.root / "of two", into, their, options=COMPARE)
        check_all("one process", into, their)

    def test_each_folder_has_the_names_of_its_model(self) -> None:
        beside = (("actor/config.json", b'{"a": 1}'), ("notes.json", b"{}"))
        save(self.root / "c", self.live, self.optims, format=OwnFormat(beside=beside))
        check_folder(self.root / "c")
        for name, model in self.live.items():
            check_same(
                name,
                dict(sorted(load_file(self.root / "c" / name / "model.safetensors").items())),
                {key: value.detach() for key, value in sorted(model.state_dict().items()) if "extra" not in key},
            )
        state = load_file(self.root / "c" / "critic" / "optim.safetensors")
        wanted_state = {
            f"state.{name}.momentum_buffer": self.optims["critic"].state[param]["momentum_buffer"]
            for name, param in self.live["critic"].named_parameters()
        }
        check_same("state", dict(sorted(state.items())), dict(sorted(wanted_state.items())))
        self.assertEqual((self.root / "c" / "actor" / "config.json").read_bytes(), b'{"a": 1}')
        names = sorted(str(path.relative_to(self.root / "c")) for path in self.root.glob("c/*"))
        self.assertEqual(names, ["actor", "critic", "ema", "extra", "fsdp_optim.json", "notes.json", "reference"])
        self.assertFalse((self.root / "c" / "ema" / "optim.safetensors").exists())

    def test_groups_for_other_readers_are_those_of_one_model(self) -> None:
        from safetensors import safe_open

        save(self.root / "c", self.live, self.optims)
        for name, optim in self.optims.items():
            with safe_open(str(self.root / "c" / name / "optim.safetensors"), "pt") as file:
                groups = json.loads(file.metadata()["param_groups"])
            self.assertEqual([group["weight_decay"] for group in groups], [0.25, 0.0])
            self.assertEqual(groups[1]["params"], ["inner.bias"])
            self.assertEqual(groups[0]["lr"], optim.param_groups[0]["lr"])

    def test_a_flipped_bit_in_one_folder_is_found(self) -> None:
        for name in ("critic/model.safetensors", "critic/optim.safetensors"):
            path = self.root / name.replace("/", "-")
            save(path, self.live, self.optims)
            flip(path / name, (path / name).stat().st_size - 2, bit=3)
            into, their = models(dict.fromkeys(SAVED, "plain"), filled=False)
            refused(lambda path=path: fsdp_optim.verify(path), fsdp_optim.CheckpointError, name, "outer.weight")
            call = functools.partial(fsdp_optim.load, path, into, their)
            refused(call, fsdp_optim.CheckpointError, name)
            refused(lambda path=path: fsdp_optim.verify(path / "critic"), fsdp_optim.CheckpointError, name)
            fsdp_optim.verify(path / "actor")
            fsdp_optim.load(path, {"actor": into["actor"]}, {"actor": their["actor"]})
            check_all("the others", {"actor": into["actor"]}, {"actor": their["actor"]})

    def test_tools_take_the_checkpoint_and_one_folder(self) -> None:
        path = self.root / "c"
        save(path, self.live, self.optims, state={"n": 1})
        self.assertEqual(fsdp_optim.inspect(path).about["models"], "actor, critic, ema, reference")
        self.assertEqual(
            sorted(fsdp_optim.inspect(path / "critic").model), ["inner.bias", "inner.weight", "outer.weight", "seen"]
        )
        self.assertFalse(fsdp_optim.inspect(path / "ema").has_optim)
        for number, format in enumerate(("safetensors", "dcp", "safetensors")):
            target = self.root / f"{number}"
            fsdp_optim.convert(path if not number else self.root / f"{number - 1}", target, format=format)
            fsdp_optim.verify(target)
            self.assertEqual(fsdp_optim.diff(path, target).differing, ())
            into, their = models(dict.fromkeys(SAVED, "plain"), filled=False)
            fsdp_optim.load(target, into, their, options=COMPARE)
            check_all(f"converted {number}", into, their)
        check_folder(self.root / "0")
        self.assertTrue((self.root / "0" / "critic" / "optim.safetensors").exists())
        fsdp_optim.convert(path / "critic", self.root / "critic")
        check_folder(self.root / "critic")
        critic = plain("critic", False)
        optim = optimizer("critic", critic)
        fsdp_optim.load(self.root / "critic", critic, optim, options=COMPARE)
        check_all("one model", {"critic": critic}, {"critic": optim})
        self.assertEqual(fsdp_optim.diff(path / "critic", self.root / "critic").differing, ())
        fsdp_optim.copy(path, self.root / "copy")
        check_folder(self.root / "copy")
        self.assertEqual(fsdp_optim.diff(path, self.root / "copy").differing, ())
        refused(lambda: fsdp_optim.thin(path / "actor"), fsdp_optim.CheckpointError, "one of the models")
        fsdp_optim.thin(path)
        check_folder(path)
        self.assertFalse(list(path.glob("*/optim*")))
        into, _ = models(dict.fromkeys(SAVED, "plain"), filled=False)
        fsdp_optim.load(path, into, options=COMPARE)
        check_all("thin", into, {})

    def test_listings_see_one_checkpoint(self) -> None:
        save(self.root / "run" / "step-1", self.live, self.optims, step=1)
        self.assertEqual([entry.complete for entry in fsdp_optim.checkpoints(self.root / "run")], [True])
        for call in (fsdp_optim.latest, fsdp_optim.checkpoints):
            refused(
                lambda call=call: call(self.root / "run" / "step-1"),
                fsdp_optim.CheckpointError,
                "is a checkpoint",
            )
        (self.root / "run" / "step-1" / "critic" / "model.safetensors").unlink()
        self.assertEqual([entry.complete for entry in fsdp_optim.checkpoints(self.root / "run")], [False])

    def test_strangers_in_folders_are_carried_over(self) -> None:
        path = self.root / "c"
        save(path, self.live, self.optims)
        (path / "actor" / "config.json").write_text("{}")
        (path / "tokenizer").mkdir()
        (path / "tokenizer" / "model.json").write_text("[]")
        save(path, self.live, {"critic": self.optims["critic"]}, overwrite=True)
        self.assertEqual((path / "actor" / "config.json").read_text(), "{}")
        self.assertEqual((path / "tokenizer" / "model.json").read_text(), "[]")
        self.assertFalse((path / "actor" / "optim.safetensors").exists())
        save(path, plain("actor"), None, overwrite=True)
        self.assertEqual((path / "actor" / "config.json").read_text(), "{}")
        self.assertFalse((path / "critic").exists())

    def test_nothing_is_saved_into_a_folder_of_a_checkpoint(self) -> None:
        path = self.root / "c"
        save(path, self.live, self.optims)
        for overwrite in (False, True):
            refused(
                lambda overwrite=overwrite: save(path / "actor", plain("actor"), None, overwrite=overwrite),
                fsdp_optim.CheckpointError,
                "actor",
            )
        check_folder(path)

    def test_only_several_models_have_the_new_version(self) -> None:
        save(self.root / "a", self.live, None)
        save(self.root / "b", plain("actor"), None)
        for name, version in (("a", 5), ("b", 2)):
            self.assertIn(f'"version":{version}', (self.root / name / "fsdp_optim.json").read_text())

    def test_one_optimizer_over_two_models(self) -> None:
        def build(filled: bool) -> tuple[Any, torch.optim.Optimizer]:
            live = {name: plain(name, filled) for name in ("actor", "critic")}
            optim = torch.optim.AdamW([*live["actor"].parameters(), *live["critic"].parameters()], lr=0.5)
            if filled:
                train(nn.ModuleList(live.values()), optim, 2)
            return live, optim

        live, optim = build(True)
        save(self.root / "c", live, optim)
        into, their = build(False)
        fsdp_optim.load(self.root / "c", into, their, options=COMPARE)
        check_same("state", their.state_dict(), optim.state_dict())
        self.assertTrue((self.root / "c" / "critic" / "optim.safetensors").exists())
        critic = plain("critic", False)
        alone = torch.optim.AdamW(critic.parameters(), lr=0.1)
        fsdp_optim.load(self.root / "c" / "critic", critic, alone, options=COMPARE)
        check_same("of one", [*alone.state_dict()["state"].values()], [*optim.state_dict()["state"].values()][3:])


if __name__ == "__main__":
    unittest.main()
