"""State of fused parameters that does not fit their parts: begun anew, kept under their own names, or refused by name."""

from __future__ import annotations

import tempfile
import unittest
from typing import Any

import torch
from kit.compare import Differs, check_same, refused_on_ranks, sorted_state
from kit.fused import VIEWS, Factored, TrainedFused, Unfused
from kit.local_parts import local_of
from kit.optimizers import adam
from kit.trained import STEPS, Oracle, Trained
from kit.wrapping import cpu
from safetensors.torch import load_file
from torch import nn

import fsdp_optim
from fsdp_optim import CheckpointManager, LoadOptions, ManagerOptions, SaveOptions, View
from fsdp_optim.testing import run_on_ranks

QKV = tuple(f"attention.w{part}.weight" for part in "qkv")
BIASES = tuple(f"attention.w{part}.bias" for part in "qkv")


def param_of(trained: Trained, name: str) -> nn.Parameter:
    return dict(trained.model.named_parameters())[name]


def saved_without(folder: str) -> None:
    """wk was frozen, so it has no state; the other checkpoint lacks ff.w3 altogether."""
    with cpu():
        apart = Trained("FSDP2", adam, STEPS, Unfused)
        del apart.optim.state[param_of(apart, "attention.wk.weight")]
        fsdp_optim.save(f"{folder}/frozen", apart.model, apart.optim)
        apart = Trained("FSDP2", adam, STEPS, Unfused)
        del apart.model.ff.w3
        optim = torch.optim.Adam(apart.model.parameters())
        for key in ("lr", "betas", "eps", "weight_decay"):
            optim.param_groups[0][key] = apart.optim.param_groups[0][key]
        optim.state.update({param: apart.optim.state[param] for param in apart.model.parameters()})
        fsdp_optim.save(f"{folder}/lacking", apart.model, optim)


def state_of(fused: Trained) -> Any:
    return sorted_state(fused.gather(None, "name", views=VIEWS)["state"])


def without(state: Any, names: tuple[str, ...]) -> Any:
    return {fqn: values for fqn, values in state.items() if fqn not in names}


def begun_anew(folder: str) -> None:
    """On one rank: the fused parameter alone begins anew, whatever it has, and the rest is as saved. Then all train on."""
    wanted = sorted_state(Oracle(adam, STEPS, Unfused).by_name())
    with cpu():
        for wrapper, anew in (("FSDP2", QKV), ("FSDP1 orig", QKV), ("FSDP1 flat", (*QKV, *BIASES)), ("DDP", QKV)):
            for steps in (0, STEPS + 1):
                fused = TrainedFused(wrapper, adam, steps)
                options = LoadOptions(views=VIEWS, process_group=fused.process_group, compare=True)
                result = fsdp_optim.load(f"{folder}/frozen", fused.model, fused.optim, strict=False, options=options)
                what = f"{wrapper}, {steps} steps"
                check_same(f"{what}, begun anew", sorted(result.begun_anew), sorted(anew))
                check_same(
                    f"{what}, others", (result.missing_keys, result.unexpected_keys, result.absent), ((), (), ())
                )
                check_same(what, without(state_of(fused), anew), without(wanted, anew))
                has = {fqn for fqn, values in state_of(fused).items() if values}
                check_same(f"{what}, without state", sorted(set(anew) & has), [])
                fused.step(range(STEPS, STEPS + 1))


def kept_or_anew(folder: str) -> None:
    """A part that the checkpoint lacks keeps its live state, as other parameters do; without any, the whole begins anew."""
    wanted = sorted_state(Oracle(adam, STEPS, Unfused).by_name())
    with cpu():
        fused = TrainedFused("FSDP2", adam, STEPS)
        options = LoadOptions(views=VIEWS)
        result = fsdp_optim.load(f"{folder}/lacking", fused.model, fused.optim, strict=False, options=options)
        check_same("kept", (result.missing_keys, result.begun_anew), (("ff.w3.weight",), ()))
        check_same("state", state_of(fused), wanted)
        fused = TrainedFused("FSDP2", adam, 0)
        result = fsdp_optim.load(f"{folder}/lacking", fused.model, fused.optim, strict=False, options=options)
        anew = ("ff.w1.weight", "ff.w3.weight")
        check_same("begun anew", result.begun_anew, anew)
        check_same("rest", without(state_of(fused), anew), without(wanted, anew))


def of_a_dict(folder: str) -> None:
    """A full dict too: cut by each rank alone, and sent by one."""
    with cpu():
        apart = Trained("FSDP2", adam, STEPS, Unfused)
        full = apart.gather(None, "name")
        del full["state"]["attention.wk.weight"]
        for name in ("shard", "scatter"):
            fused = TrainedFused("FSDP2", adam, 0)
            part = getattr(fused, name)(full, views=VIEWS, strict=False)
            loaded = fsdp_optim.load_optim_state_dict(fused.optim, part)
            check_same(f"{name}, begun anew", (bool(loaded), loaded.begun_anew), (True, QKV))
            if "begun_anew" not in repr(loaded):
                raise Differs(repr(loaded))
            check_same(name, without(state_of(fused), QKV), without(sorted_state(full["state"]), QKV))


# ------------------------------------------------------------------------------------ state that no View can cut

KEEP = {"views": VIEWS, "fused_state": "keep"}
FACTORED = ("attention.wqkv.bias", "attention.wqkv.weight", "experts.gate_up", "experts.oss", "experts.scale", "ff.w13")
NOT_FUSED = ("ff.w2.weight", "norm.bias", "norm.weight")


def live_state(trained: Trained) -> list[Any]:
    """This rank's state, in the order of the parameters."""
    names = {id(param): name.removeprefix("module.") for name, param in trained.model.named_parameters()}
    state = trained.optim.state.items()
    return [(names[id(p)], {key: local_of(value).clone() for key, value in values.items()}) for p, values in state]


def kept(folder: str, wrapper: str) -> None:
    """Saved with weights under canonical names, and loaded bit for bit into the same fusion."""
    with cpu():
        fused = TrainedFused(wrapper, Factored, 2)
        own = fused.process_group
        fsdp_optim.save(folder, fused.model, fused.optim, options=SaveOptions(process_group=own, **KEEP))
        again = TrainedFused(wrapper, Factored, 0)
        load = LoadOptions(views=VIEWS, process_group=again.process_group, compare=True)
        fsdp_optim.load(folder, again.model, again.optim, options=load)
        check_same(f"{wrapper}, state", live_state(again), live_state(fused))
        check_same(f"{wrapper}, weights", [local_of(p) for p in again.params], [local_of(p) for p in fused.params])


def shown(folder: str) -> None:
    summary = fsdp_optim.inspect(folder)
    check_same("kept", summary.about["fused_state"].splitlines(), list(FACTORED))
    check_same("weights", sorted(summary.model), sorted(Oracle(Factored, 0, Unfused).values()))
    check_same("state", sorted(summary.state), sorted((*FACTORED, *NOT_FUSED)))
    fsdp_optim.verify(folder)


OTHERS = [
    View("ff.w13", "f (a + b) c", {"ff.w3.weight": "(f a) c", "ff.w1.weight": "(f b) c"}, a=1, b=1),
    *(view for view in VIEWS if view.name != "ff.w13"),
]


def refused(folder: str) -> None:
    """By any other model: unfused, fused in another way, or seen without a View."""
    with cpu():
        apart, fused = Trained("FSDP2", Factored, 0, Unfused), TrainedFused("FSDP2", Factored, 0)
        words = "(fused_state='keep')", "row_var of its state", "give strict=False", "View("
        for what, target, views, name in (
            ("unfused", apart, [], "attention.wqkv.bias"),
            ("fused in another way", fused, OTHERS, "ff.w13"),
        ):
            before = [local_of(param).clone() for param in target.params]
            load = LoadOptions(views=views)
            refused_on_ranks(
                what,
                lambda: fsdp_optim.load(folder, target.model, target.optim, options=load),  # noqa: B023
                "StateError",
                name,
                *words,
            )
            check_same(f"{what}, weights", [local_of(param) for param in target.params], before)
        refused_on_ranks(
            "without Views",
            lambda: fsdp_optim.load(folder, fused.model, fused.optim, weights="none"),
            "StateError",
            "attention.wqkv.bias",
            *words,
        )


def anew_elsewhere(folder: str) -> None:
    """strict=False: what has no such fusion begins without state, and everything else is loaded."""
    with cpu():
        for wrapper in ("FSDP2", "DDP"):
            for steps in (0, 1):
                apart = Trained(wrapper, Factored, steps, Unfused)
                options = LoadOptions(process_group=apart.process_group, compare=True)
                result = fsdp_optim.load(folder, apart.model, apart.optim, strict=False, options=options)
                parts = sorted(Oracle(Factored, 0, Unfused).values().keys() - set(NOT_FUSED))
                check_same("begun anew", sorted(result.begun_anew), parts)
                check_same("not there", (result.missing_keys, sorted(result.unexpected_keys)), ((), sorted(FACTORED)))
                has = {name for name, values in live_state(apart) if values}
                check_same("state", sorted(set(parts) & has), [])
                check_same("others", sorted(has), list(NOT_FUSED))
        fused = TrainedFused("FSDP2", Factored, 1)
        result = fsdp_optim.load(folder, fused.model, fused.optim, strict=False, options=LoadOptions(views=OTHERS))
        check_same("of another fusion", sorted(result.begun_anew), ["ff.w1.weight", "ff.w3.weight"])
        has = {name for name, values in live_state(fused) if values}
        check_same("others", ("ff.w13" in has, "experts.oss" in has), (False, True))


def other_options(folder: str) -> None:
    """ "keep" changes nothing for state that can be cut; a format without a place for it refuses it."""
    with cpu():
        fused = TrainedFused("FSDP2", adam, STEPS)
        fsdp_optim.save(folder, fused.model, fused.optim, options=SaveOptions(**KEEP))
        check_same("kept", "fused_state" in fsdp_optim.inspect(folder).about, False)
        again = Trained("FSDP2", adam, 0, Unfused)
        fsdp_optim.load(folder, again.model, again.optim)
        check_same("state", sorted_state(again.gather(None, "name")["state"]), state_of(fused))
        factored = TrainedFused("FSDP2", Factored, 1)
        for words, options in (
            (("fused_state must be 'error' or 'keep'",), SaveOptions(views=VIEWS, fused_state="drop")),  # type: ignore[arg-type]
            (("row_var is a Tensor", "fused_state='keep'"), SaveOptions(views=VIEWS)),
        ):
            refused_on_ranks(
                "a save",
                lambda: fsdp_optim.save(f"{folder}-x", factored.model, factored.optim, options=options),  # noqa: B023
                "StateError",
                *words,
            )
        refused_on_ranks(
            "another format",
            lambda: fsdp_optim.save(
                f"{folder}-x", factored.model, factored.optim, format="dcp", options=SaveOptions(**KEEP)
            ),
            "StateError",
            "has no place for the names of fused parameters",
        )


def renamed(folder: str) -> None:
    with cpu():
        fused = TrainedFused("FSDP2", Factored, 2)
        fsdp_optim.save(folder, fused.model, fused.optim, options=SaveOptions(rename={"": "model."}, **KEEP))
        again = TrainedFused("FSDP2", Factored, 0)
        load = LoadOptions(views=VIEWS, rename={"model.": ""}, compare=True, cast=True)
        fsdp_optim.load(folder, again.model, again.optim, options=load)
        check_same("state", live_state(again), live_state(fused))


def managed(folder: str) -> None:
    """By a manager, in the background, with fingerprints and with proofs."""
    with cpu():
        options = ManagerOptions(rng=False, signals=(), fingerprint=True, **KEEP)
        fused, again = TrainedFused("FSDP2", Factored, 2), TrainedFused("FSDP2", Factored, 0)
        with CheckpointManager(folder, fused.model, fused.optim, every=1, options=options, prove=True) as manager:
            manager.save(1)
            manager.wait()
        with CheckpointManager(folder, again.model, again.optim, every=1, options=options) as manager:
            check_same("step", manager.resume(), 1)
        check_same("state", live_state(again), live_state(fused))


# ------------------------------------------------------------------------------------ dtypes and strides


class Narrow(torch.optim.Optimizer):
    """Moments in bf16 and fp8, of which each element is a function of the parameter's."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in (param for group in self.param_groups for param in group["params"] if param.grad is not None):
            value = param.detach()
            self.state[param] = {
                "step": torch.tensor(3.0),
                "exp_avg": (value * 0.37).to(torch.bfloat16),
                "exp_avg_sq": (value * 1.9).to(torch.float8_e4m3fn),
            }


def in_narrow_dtypes(folder: str) -> None:
    """Cut by elements and never cast, fused to unfused and back."""
    with cpu():
        oracle = Oracle(Narrow, 2, Unfused)
        wanted = sorted_state(oracle.by_name())
        dtypes = {value.dtype for value in wanted["ff.w1.weight"].values()}
        check_same("dtypes", dtypes, {torch.float32, torch.bfloat16, torch.float8_e4m3fn})
        fused = TrainedFused("FSDP2", Narrow, 2)
        check_same("gathered", state_of(fused), wanted)
        fsdp_optim.save(f"{folder}/fused", fused.model, fused.optim, options=SaveOptions(views=VIEWS))
        apart = Trained("FSDP1 orig", Narrow, 0, Unfused)
        fsdp_optim.load(f"{folder}/fused", apart.model, apart.optim, options=LoadOptions(compare=True))
        check_same("unfused", sorted_state(apart.gather(None, "name")["state"]), wanted)
        fsdp_optim.save(f"{folder}/apart", apart.model, apart.optim)
        again = TrainedFused("FSDP1 flat", Narrow, 0)
        fsdp_optim.load(f"{folder}/apart", again.model, again.optim, options=LoadOptions(views=VIEWS, compare=True))
        check_same("fused again", state_of(again), wanted)


STANDING = [View("w", "(a + b) c", {"a.w": "c a", "b.w": "b c"})]


def standing(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A fused parameter whose columns lie in a row in memory, as channels_last and transposed parameters do."""
    model = nn.ParameterDict({"w": nn.Parameter(torch.arange(40.0).view(5, 8).t())})
    optim = torch.optim.Adam(model.parameters())
    for step in range(steps):
        model["w"].grad = torch.arange(40.0).view(8, 5) + step
        optim.step()
    return model, optim


class TestElements(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def test_narrow_dtypes(self) -> None:
        run_on_ranks(in_narrow_dtypes, 2, self.folder)

    def test_strides(self) -> None:
        (model, optim), (again, other) = standing(2), standing(0)
        fsdp_optim.save(f"{self.folder}/step", model, optim, options=SaveOptions(views=STANDING))
        saved = load_file(f"{self.folder}/step/model.safetensors")
        check_same("parts", saved, {"a.w": model["w"][:4].t().contiguous(), "b.w": model["w"][4:].contiguous()})
        load = LoadOptions(views=STANDING, compare=True)
        fsdp_optim.load(f"{self.folder}/step", again, other, options=load)
        (state,), (like,) = other.state.values(), optim.state.values()
        for name, value, wanted in (
            ("weights", again["w"].detach(), model["w"].detach()),
            *((name, state[name], like[name]) for name in ("exp_avg", "exp_avg_sq")),
        ):
            check_same(f"{name}, strides", value.stride(), (1, 8))
            check_same(name, value, wanted)


class TestKept(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = f"{folder.name}/step"

    def test_state_of_factors(self) -> None:
        run_on_ranks(kept, 2, self.folder, "DDP")
        shown(self.folder)
        run_on_ranks(refused, 2, self.folder)
        run_on_ranks(anew_elsewhere, 2, self.folder)

    def test_other_wrappers(self) -> None:
        for wrapper in ("FSDP2", "FSDP1 flat", "FSDP1 orig", "plain"):
            run_on_ranks(kept, 2, f"{self.folder}-{wrapper}", wrapper)

    def test_other_options(self) -> None:
        run_on_ranks(other_options, 2, self.folder)
        run_on_ranks(renamed, 2, f"{self.folder}-renamed")
        run_on_ranks(managed, 2, f"{self.folder}-managed")


class TestBegunAnew(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def test_a_fused_parameter_of_which_a_part_has_no_state(self) -> None:
        run_on_ranks(saved_without, 2, self.folder)
        run_on_ranks(begun_anew, 2, self.folder)
        run_on_ranks(kept_or_anew, 2, self.folder)

    def test_full_dicts(self) -> None:
        run_on_ranks(of_a_dict, 2, self.folder)
