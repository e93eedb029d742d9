"""Whether the API reference is whole: every public name has its place, a docstring, and a word about each argument."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import griffe

from website.docstrings import Docstrings

ROOT = Path(__file__).parents[1]
DIRECTIVE = re.compile(r"^::: ([\w.]+)", re.MULTILINE)
PLUG_INS = tuple(
    f"fsdp_optim.integrations.{name}"
    for name in (
        *("accelerate", "transformers", "lightning", "peft", "torchtitan", "verl"),
        *("nemo_automodel", "llama_factory", "prime_rl"),
    )
)
DOCUMENTED = ("fsdp_optim", "fsdp_optim.testing", "fsdp_optim.fairscale", *PLUG_INS)
"""The modules whose `__all__` is the public interface."""
CALLED_BY_TRAINERS = {
    "fsdp_optim.integrations.accelerate.FsdpOptimTrainerMixin",
    "fsdp_optim.integrations.accelerate.Settings",
    "fsdp_optim.integrations.torchtitan.FsdpOptimCheckpointManager",
    "fsdp_optim.integrations.verl.FsdpOptimCheckpointManager",
    *(f"fsdp_optim.integrations.lightning.{name}Strategy" for name in ("DDP", "FSDP", "ModelParallel")),
    "fsdp_optim.integrations.lightning.Checkpoints",
}
"""Classes whose methods a trainer or the plug-in calls: the pages do not show these."""
MADE_HERE = {
    "fsdp_optim.SaveHandle",
    "fsdp_optim.integrations.torchtitan.FsdpOptimCheckpointManager",
    "fsdp_optim.integrations.verl.FsdpOptimCheckpointManager",
    *(f"fsdp_optim.testing.{name}" for name in ("RanksFailed", "RemoteError", "WorkerDied")),
}
"""Classes that only the library or a trainer makes: nobody calls their constructors."""


def described(pages: Path) -> Counter[str]:
    """The names that the pages of the reference describe."""
    return Counter(name for page in sorted(pages.rglob("*.md")) for name in DIRECTIVE.findall(page.read_text()))


def of_function(name: str, function: griffe.Function) -> list[str]:
    """The gaps in the docstring of a function or a method."""
    if function.docstring is None:
        return [f"{name} has no docstring"]
    return undescribed(name, function.docstring, [parameter.name for parameter in function.parameters])


def undescribed(name: str, docstring: griffe.Docstring, parameters: list[str]) -> list[str]:
    known: set[str] = set()
    for section in docstring.parse("google", warnings=False):
        if section.kind in (griffe.DocstringSectionKind.parameters, griffe.DocstringSectionKind.attributes):
            known |= {parameter.name for parameter in section.value}
    expected = [one for one in parameters if one not in ("self", "cls")]
    return [f"{name}: the docstring does not describe the argument {one}" for one in expected if one not in known]


def of_class(name: str, cls: griffe.Class) -> list[str]:
    """The gaps in the docstrings of a class, its public methods and its properties."""
    if cls.docstring is None:
        return [f"{name} has no docstring"]
    if name.endswith("Conformance"):  # tests, and hooks that the author of a plug-in writes
        return []
    found = []
    init = cls.members.get("__init__")
    if isinstance(init, griffe.Function) and name not in MADE_HERE:
        beside = {
            field for field, member in cls.members.items() if member.is_attribute and member.docstring is not None
        }
        inherited = {field for base in cls.mro() for field, member in base.members.items() if member.is_attribute}
        wanted = [one.name for one in init.parameters if one.name not in beside | (inherited - set(cls.members))]
        found += undescribed(name, cls.docstring, wanted)
    for method, member in cls.members.items():
        if method.startswith("_") or member.is_alias:
            continue
        if isinstance(member, griffe.Class):
            found += of_class(f"{name}.{method}", member)
        elif name in CALLED_BY_TRAINERS:
            continue
        elif isinstance(member, griffe.Function):
            found += of_function(f"{name}.{method}", member)
        elif member.docstring is None and "property" in member.labels:
            found.append(f"{name}.{method} has no docstring")
    return found


def problems(pages: Path, search: Path = ROOT, modules: tuple[str, ...] = DOCUMENTED) -> list[str]:
    """One sentence for each public name that is missing, given twice or not described."""
    loader = griffe.GriffeLoader(search_paths=[search], extensions=griffe.load_extensions(Docstrings))
    loader.load(modules[0].split(".")[0])
    loader.resolve_aliases(external=False)
    places = described(pages)
    found = [f"{name} is described {times} times" for name, times in places.items() if times > 1]
    for module in modules:
        exports = loader.modules_collection[module].exports or ()
        for export in sorted(str(one) for one in exports):
            name = f"{module}.{export}"
            if name not in places:
                found.append(f"{name} is on no page of the reference")
            one = loader.modules_collection[name]
            one = one.final_target if one.is_alias else one  # type: ignore[union-attr]
            if isinstance(one, griffe.Function):
                found += of_function(name, one)
            elif isinstance(one, griffe.Class):
                found += of_class(name, one)
            elif one.docstring is None:
                found.append(f"{name} has no docstring")
    return found
