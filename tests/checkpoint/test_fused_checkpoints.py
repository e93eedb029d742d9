"""Checkpoints with fused names, loaded through Views: into the unfused model, the fused one, and another fusion, bit for bit."""

from __future__ import annotations

import functools
import itertools
import tempfile
import unittest
from typing import Any

import torch
import torch.distributed.checkpoint as torch_dcp
from kit.cases import expand, some
from kit.compare import check_same, refused_on_ranks, sorted_state
from kit.fused import VIEWS, C, F, Fused, TrainedFused, Unfused, fused_from
from kit.optimizers import adam
from kit.trained import STEPS, Oracle, Trained
from kit.wrapping import cpu
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import fsdp_optim
from fsdp_optim import CallOptions, CheckpointManager, ConvertOptions, LoadOptions, ManagerOptions, SaveOptions, View
from fsdp_optim.testing import fairscale_on_cpu, run_on_ranks

FUSED, UNFUSED = True, False
LOAD = LoadOptions(views=VIEWS)
WRAPPERS = ("FSDP2", "FSDP2 x TP", "FSDP1 flat", "DDP", "plain")


def trained(is_fused: bool, wrapper: str, steps: int) -> Trained:
    return TrainedFused(wrapper, adam, steps) if is_fused else Trained(wrapper, adam, steps, Unfused)


def check_trained(what: str, target: Trained, is_fused: bool, oracle: Oracle) -> None:
    views = VIEWS if is_fused else []
    state = target.gather(None, "name", views=views)["state"]
    check_same(f"{what}, state", sorted_state(state), sorted_state(oracle.by_name()))
    options = CallOptions(views=views, process_group=target.process_group)
    weights = fsdp_optim.gather_full_model_state_dict(target.model, None, options=options)
    check_same(f"{what}, weights", dict(sorted(weights.items())), dict(sorted(oracle.values().items())))


def save_fused(folder: str, wrapper: str, by: str) -> None:
    """A run that knows of no Views: its checkpoint has the fused names."""
    with cpu(), fairscale_on_cpu():
        source = TrainedFused(wrapper, adam, STEPS)
        options = SaveOptions(process_group=source.process_group)
        if by in ("safetensors", "dcp"):
            fsdp_optim.save(folder, source.model, source.optim, format=by, options=options)
        elif by.startswith("torch's dcp"):
            kept = torch_dcp.state_dict.StateDictOptions(flatten_optimizer_state_dict=by.endswith("flattened"))
            weights, state = get_state_dict(source.model, source.optim, options=kept)
            if ", cut" in by:  # as by state-dict hooks, which change the weights alone
                weights = fsdp_optim.gather_full_model_state_dict(
                    source.model, None, options=CallOptions(views=VIEWS, process_group=source.process_group)
                )
            torch_dcp.save({"model": weights, "optim": state}, checkpoint_id=folder)
        else:
            by_id = {"model": source.model.state_dict(), "optimizer": source.optim.state_dict()}
            torch.save(by_id, folder)


def resume(folder: str, is_fused: bool, wrapper: str) -> None:
    """Load, compare, train on, compare with the run that never fused."""
    with cpu(), fairscale_on_cpu():
        target = trained(is_fused, wrapper, 0)
        options = LoadOptions(views=VIEWS, process_group=target.process_group, compare=True)
        result = fsdp_optim.load(folder, target.model, target.optim, options=options)
        check_same("keys", (result.missing_keys, result.unexpected_keys), ((), ()))
        check_trained("loaded", target, is_fused, Oracle(adam, STEPS, Unfused))
        target.step(range(STEPS, STEPS + 2))
        check_trained("trained on", target, is_fused, Oracle(adam, STEPS + 2, Unfused))


def resume_unseen(folder: str) -> None:
    """Load a checkpoint with canonical names, without Views."""
    with cpu():
        target = trained(UNFUSED, "FSDP2", 0)
        fsdp_optim.load(folder, target.model, target.optim)
        check_trained("loaded", target, UNFUSED, Oracle(adam, STEPS, Unfused))


class TestLoads(unittest.TestCase):
    @expand(
        *some(
            [
                (first, n, is_fused, second, m)
                for (first, n), (second, m) in itertools.product(
                    itertools.product(WRAPPERS, (1, 2)), itertools.product(WRAPPERS, (1, 3, 4))
                )
                for is_fused in (FUSED, UNFUSED)
            ],
            every=23,
        )
    )
    def test_a_run_that_did_not_know_of_views(self, first: str, n: int, is_fused: bool, second: str, m: int) -> None:
        """It continues as if its checkpoint had canonical names: unfused as the run that never fused, and fused."""
        with tempfile.TemporaryDirectory() as folder:
            run_on_ranks(save_fused, n, f"{folder}/step", first, "safetensors")
            run_on_ranks(resume, m, f"{folder}/step", is_fused, second)

    @expand(["dcp", "torch's dcp", "torch's dcp, flattened", "torch's dcp, cut", "torch's dcp, cut, flattened"], [])
    def test_files_of_dcp(self, by: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            run_on_ranks(save_fused, 2, f"{folder}/step", "FSDP2", by)
            run_on_ranks(resume, 3, f"{folder}/step", UNFUSED, "FSDP2")
            run_on_ranks(resume, 2, f"{folder}/step", FUSED, "FSDP2")

    def test_a_file_of_torch_with_ids(self) -> None:
        """Its ids count the fused parameters, each where the first of its parts is."""
        with tempfile.TemporaryDirectory() as folder:
            run_on_ranks(save_fused, 1, f"{folder}/run.pt", "plain", "torch")
            run_on_ranks(resume, 2, f"{folder}/run.pt", UNFUSED, "FSDP2")
            run_on_ranks(resume, 2, f"{folder}/run.pt", FUSED, "FSDP2")

    def test_a_file_of_torch_with_the_parts_of_a_wrapper(self) -> None:
        """DistributedDataParallel puts `module.` before every name."""
        with tempfile.TemporaryDirectory() as folder:
            run_on_ranks(save_fused, 1, f"{folder}/run.pt", "DDP", "torch")
            run_on_ranks(resume, 2, f"{folder}/run.pt", UNFUSED, "FSDP2")
            options = ConvertOptions(views=VIEWS, param_names=[name for name, _ in Fused().named_parameters()])
            fsdp_optim.convert(f"{folder}/run.pt", f"{folder}/apart", options=options)
            run_on_ranks(resume_unseen, 2, f"{folder}/apart")


# ------------------------------------------------------------------------------------------------ other checkpoints


def values_of_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """Random values of the unfused model."""
    torch.manual_seed(seed)
    return {name: torch.randn(param.shape) for name, param in Unfused().named_parameters()}


def under(prefix: str) -> list[View]:
    """The Views of a model that is a module of another, or one of several."""
    views = [
        View(f"{prefix}.{v.name}", v.axes, {f"{prefix}.{p}": t for p, t in v.parts}, **dict(v.sizes)) for v in VIEWS
    ]
    return [view for view in views if "*" not in view.name] + [view for view in VIEWS if "*" in view.name]


class OtherFusion(nn.Module):
    """The same model with another fusion: only the gates, in halves, and transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Unfused()
        del self.inner.ff.w1, self.inner.ff.w3
        self.inner.ff.w31 = nn.Parameter(torch.zeros(C, 2 * F))


OTHER = View("inner.ff.w31", "c (b + a)", {"inner.ff.w1.weight": "a c", "inner.ff.w3.weight": "b c"})


def loaded_otherwise(folder: str) -> None:
    """One list of Views has those of the file and those of the model; `rename` comes between the two, once."""
    with cpu():
        values = values_of_weights()
        expected = {f"inner.{name}": value for name, value in values.items()}
        w1, w3 = (expected.pop(f"inner.ff.w{number}.weight") for number in (1, 3))
        expected["inner.ff.w31"] = torch.cat([w3, w1]).T
        for rename in ({"": "inner."}, lambda name: f"inner.{name}"):
            model = OtherFusion()
            options = LoadOptions(views=[*under("inner"), OTHER], rename=rename)
            fsdp_optim.load(folder, model, options=options)
            check_same("another fusion", dict(sorted(model.state_dict().items())), dict(sorted(expected.items())))
        missing = "ff.w1.weight: the model has it, the checkpoint does not"
        options = LoadOptions(views=VIEWS[:2])
        refused_on_ranks("no View", lambda: fsdp_optim.load(folder, Unfused(), options=options), "StateError", missing)


def loaded_parts(folder: str) -> None:
    """The halves of a checkpoint alone, and several models."""
    with cpu():
        source = TrainedFused("FSDP2", adam, STEPS)
        oracle = Oracle(adam, STEPS, Unfused)
        fsdp_optim.save(f"{folder}/weights", source.model)
        fsdp_optim.save(f"{folder}/optim", source.model, source.optim, weights="none")
        fsdp_optim.save(f"{folder}/two", {"a": source.model, "b": nn.Linear(2, 2)}, {"a": source.optim})
        target = trained(UNFUSED, "FSDP2", 0)
        fsdp_optim.load(f"{folder}/weights", target.model, options=LOAD)
        fsdp_optim.load(f"{folder}/optim", target.model, target.optim, weights="none", options=LOAD)
        check_trained("halves", target, UNFUSED, oracle)
        again, options = trained(UNFUSED, "FSDP2", 0), LoadOptions(views=under("a"))
        fsdp_optim.load(f"{folder}/two", {"a": again.model}, {"a": again.optim}, options=options)
        check_trained("one of two models", again, UNFUSED, oracle)


def thinned(folder: str) -> None:
    with cpu():
        target = trained(UNFUSED, "FSDP2", 0)
        fsdp_optim.load(folder, target.model, options=LOAD)
        options = CallOptions(process_group=target.process_group)
        weights = fsdp_optim.gather_full_model_state_dict(target.model, None, options=options)
        check_same(
            "weights", dict(sorted(weights.items())), dict(sorted(Oracle(adam, STEPS, Unfused).values().items()))
        )
        refused_on_ranks(
            "its optimizer",
            lambda: fsdp_optim.load(folder, target.model, target.optim, options=LOAD),
            "StateError",
            "thinned",
        )


def proven(folder: str) -> None:
    """The fingerprints of values that no View changes are compared; those of fused ones say nothing about parts."""
    with cpu():
        source, target = TrainedFused("FSDP2", adam, STEPS), trained(UNFUSED, "FSDP2", 0)
        fsdp_optim.save(folder, source.model, source.optim, options=SaveOptions(fingerprint=True))
        receipt = fsdp_optim.load(folder, target.model, target.optim, options=LOAD).receipt
        check_trained("loaded", target, UNFUSED, Oracle(adam, STEPS, Unfused))
        unchanged = [name for name, _ in Fused().named_parameters() if not any(view.matches(name) for view in VIEWS)]
        if receipt is not None:
            check_same("proven", receipt.num_proven, len(unchanged) * len(("weight", "step", "exp_avg", "exp_avg_sq")))


def managed(root: str) -> None:
    """A run that was fused without Views is resumed with them, and its next checkpoint has canonical names."""
    with cpu():
        fused, apart = TrainedFused("FSDP2", adam, STEPS), trained(UNFUSED, "FSDP2", 0)
        with CheckpointManager(root, fused.model, fused.optim, every=1) as manager:
            manager.save(step=1)
        with CheckpointManager(root, apart.model, apart.optim, every=1, options=ManagerOptions(views=VIEWS)) as manager:
            manager.resume()
            check_trained("resumed", apart, UNFUSED, Oracle(adam, STEPS, Unfused))
            manager.save(step=2)
        names = fsdp_optim.inspect(f"{root}/step-00000002").model
        check_same("names", sorted(names), sorted(name for name, _ in Unfused().named_parameters()))


class TestOthers(unittest.TestCase):
    def test_another_fusion(self) -> None:
        """A folder of safetensors, as Hugging Face has it, of a model that is fused in one way into one fused in another."""
        with tempfile.TemporaryDirectory() as folder:
            save_file(
                {name: value.contiguous() for name, value in fused_from(values_of_weights()).items()},
                f"{folder}/model.safetensors",
            )
            run_on_ranks(loaded_otherwise, 1, folder)

    def test_halves_and_several_models(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            run_on_ranks(loaded_parts, 2, folder)

    def test_a_thinned_checkpoint(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            run_on_ranks(save_fused, 2, f"{folder}/step", "FSDP2", "safetensors")
            fsdp_optim.thin(f"{folder}/step")
            run_on_ranks(thinned, 2, f"{folder}/step")

    def test_fingerprints(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            run_on_ranks(proven, 2, f"{folder}/step")

    def test_a_manager(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            run_on_ranks(managed, 2, folder)


# ------------------------------------------------------------------------------------------------ refusals


class Factored(torch.optim.Optimizer):
    """Adafactor's way: the state of a matrix is a row."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in (param for group in self.param_groups for param in group["params"]):
            rows = param.flatten(1).sum(1) if param.dim() > 1 else param.clone()
            self.state[param] = {"step": torch.tensor(1.0), "row_var": rows}


class Halves(nn.Module):
    """Two matrices, fused or apart; with `tied`, the fused one has a second name."""

    def __init__(self, *, is_fused: bool, tied: bool = False) -> None:
        super().__init__()
        names = {"ab": (6, 3)} if is_fused else {"a": (4, 3), "b": (2, 3)}
        for name, shape in names.items():
            setattr(self, name, nn.Parameter(torch.arange(shape[0] * 3.0).view(shape)))
        if tied:
            self.other = self.ab


HALVES = View("ab", "(a + b) c", {"a": "a c", "b": "b c"}, a=4, b=2)


def refused(folder: str) -> None:
    """On all ranks alike, and nothing is loaded."""
    with cpu():
        fused, apart = Halves(is_fused=True), Halves(is_fused=False)
        optim = Factored(fused.parameters())
        optim.step()
        fsdp_optim.save(f"{folder}/factored", fused, optim)
        fsdp_optim.save(f"{folder}/tied", Halves(is_fused=True, tied=True))
        both = Halves(is_fused=True)
        both.a = nn.Parameter(torch.zeros(4, 3))
        fsdp_optim.save(f"{folder}/both", both)
        before = [param.detach().clone() for param in apart.parameters()]
        cases = {
            "factored": (
                "factored",
                [HALVES],
                "StateError",
                ("ab: row_var is", "shape [6]", "leave the View of ab out"),
            ),
            "shape": (
                "factored",
                [View("ab", "(a + b) c", {"a": "a c", "b": "b c"}, a=4, b=3)],
                "LayoutError",
                ("ab: ", "is 6"),
            ),
            "two": ("factored", [HALVES, View("a{x}", "r c", {"a{x}.w": "r c"})], "StateError", ("ab: two Views",)),
            "taken": ("both", [HALVES], "StateError", ("a: two parameters would have this name", "a part of ab")),
            "tied": ("tied", [HALVES], "StateError", ("other and ab are one tied parameter", "no View is of other")),
            "nothing": ("factored", [HALVES, View("zz", "r", {"yy": "r"})], "StateError", ("View('zz'", "on any rank")),
            "inverse": ("factored", [HALVES.inverse], "StateError", ("for checkpoints alone", "without .inverse")),
        }
        for what, (name, views, kind, words) in cases.items():
            optimizer = Factored(apart.parameters()) if what == "factored" else None
            load = functools.partial(
                fsdp_optim.load, f"{folder}/{name}", apart, optimizer, options=LoadOptions(views=views)
            )
            refused_on_ranks(what, load, kind, *words)
            check_same(f"{what}: weights", [param.detach() for param in apart.parameters()], before)
        both_names = [View(n, "(a + b) c", {f"{n}_a": "a c", f"{n}_b": "b c"}, a=4, b=2) for n in ("ab", "other")]
        renamed = nn.ParameterDict({"ab_a": torch.zeros(4, 3), "ab_b": torch.zeros(2, 3)})
        renamed["other_a"], renamed["other_b"] = renamed["ab_a"], renamed["ab_b"]
        fsdp_optim.load(f"{folder}/tied", renamed, options=LoadOptions(views=both_names))
        check_same("aliases of parts", renamed["other_b"].detach(), torch.arange(18.0).view(6, 3)[4:])


class TestRefusals(unittest.TestCase):
    def test_what_does_not_fit(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            run_on_ranks(refused, 2, folder)
