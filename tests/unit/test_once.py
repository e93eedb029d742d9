"""A value that a tree of modules computes once is found by the identity of its arguments, which live as long as the tree."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fsdp_optim.adapters import ModuleTree


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
    for one in (thing, equal, thing):
        tree.once(read, one)
    assert [id(one) for one in asked] == [id(thing), id(equal)]
