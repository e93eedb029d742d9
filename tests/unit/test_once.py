"""What is computed once is found by the identity of what it was computed from, which lives as long as the answer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fsdp_optim.adapters import ModuleTree
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
