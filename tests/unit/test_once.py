"""What is computed once is found by the identity of what it was computed from, which lives as long as the answer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fsdp_optim.adapters import ModuleTree
from fsdp_optim.adapters.tree import instances_of
from fsdp_optim.layout.once import once_each


@dataclass
class Thing:
    number: int


def number_of(thing: Thing) -> int:
    return thing.number


def test_a_new_object_with_the_id_of_one_that_is_gone() -> None:
    tree = ModuleTree(nn.Linear(1, 1), is_wrapper_child=lambda module, name: False)
    assert [tree.once(number_of, Thing(number)) for number in range(100)] == list(range(100))


def test_computed_once() -> None:
    tree, asked = ModuleTree(nn.Linear(1, 1), is_wrapper_child=lambda module, name: False), list[Thing]()
    read, thing, equal = asked.append, Thing(1), Thing(1)
    for argument in (thing, equal, thing):
        tree.once(read, argument)
    assert [id(argument) for argument in asked] == [id(thing), id(equal)]


def test_a_tree_lists_once() -> None:
    tree, asked = ModuleTree(nn.Linear(1, 1), is_wrapper_child=lambda module, name: False), list[object]()

    def names(of: ModuleTree) -> list[str]:
        asked.append(of)
        return [name for _, sites in of.params() for _, name in sites]

    assert tree.listed(names) is tree.listed(names)
    assert tree.listed(names) == ["weight", "bias"]
    assert asked == [tree]


class Wrapper(nn.Module):
    def __init__(self, *children: nn.Module) -> None:
        super().__init__()
        self.inner, self.other = children


class OfUser(Wrapper):
    """A class of the user's own, with the same names."""


def test_each_class_of_module_is_asked_once() -> None:
    asked = list[tuple[type, str]]()

    def is_inside(module: nn.Module, name: str) -> bool:
        asked.append((type(module), name))
        return type(module) is Wrapper and name == "inner"

    def wrapped(kind: type[Wrapper], depth: int) -> nn.Module:
        return kind(wrapped(kind, depth - 1), nn.Linear(1, 1)) if depth else nn.Linear(1, 1)

    model = nn.ModuleDict({"a": wrapped(Wrapper, 1), "b": wrapped(OfUser, 2), "c": wrapped(Wrapper, 1)})
    tree = ModuleTree(model, is_wrapper_child=is_inside)
    names = [tree.fqn(*sites[0]) for _, sites in tree.params()]
    inside_b = ("b.inner.inner", "b.inner.other", "b.other")
    assert [name for name in names if name.endswith(".weight")] == [
        f"{path}.weight" for path in ("a", "a.other", *inside_b, "c", "c.other")
    ]
    assert sorted((kind.__name__, name) for kind, name in asked) == sorted(
        [(nn.ModuleDict.__name__, name) for name in "abc"]
        + [(kind.__name__, name) for kind in (Wrapper, OfUser) for name in ("inner", "other")]
    )


def test_modules_of_a_class_and_of_its_subclasses_in_order() -> None:
    first, second, third = OfUser(nn.Linear(1, 1), nn.ReLU()), nn.Linear(1, 1), Wrapper(nn.ReLU(), nn.ReLU())
    modules = [first, second, third, first]
    assert instances_of(modules, Wrapper) == [first, third, first]
    assert instances_of(modules, OfUser) == [first, first]
    assert instances_of(modules, nn.Module) == modules
    assert instances_of(modules, nn.Conv2d) == instances_of([], nn.Module) == []


def test_each_object_is_asked_once() -> None:
    asked = list[Thing]()

    def read(thing: Thing) -> int:
        asked.append(thing)
        return thing.number

    ask, thing, equal = once_each(read), Thing(1), Thing(1)
    assert [ask(each) for each in (thing, equal, thing)] == [1, 1, 1]
    assert [id(each) for each in asked] == [id(thing), id(equal)]


def test_an_object_that_was_asked_keeps_its_id() -> None:
    ask = once_each(number_of)
    assert [ask(Thing(number)) for number in range(100)] == list(range(100))
