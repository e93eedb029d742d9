"""The round trip of the full dict, by id and by name, and the recognition of each dialect."""

from __future__ import annotations

import copy
import unittest
from dataclasses import replace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.compare import check_same
from parameterized import parameterized

from fsdp_optim import StateError
from fsdp_optim.state.dicts import NON_PARAM_STATE, RESERVED_KEYS, FullState, Names, dialects, normalize
from fsdp_optim.state.dicts.dialects import DIALECTS
from fsdp_optim.state.dicts.full import write

FQNS = [f"block.{index}.weight" for index in range(6)]
VALUES = st.one_of(
    st.integers(),
    st.none(),
    st.text(max_size=3),
    st.lists(st.floats(width=32), max_size=3).map(torch.tensor),
    st.builds(torch.tensor, st.integers(0, 9)),
)
OWN_KEYS = st.text(min_size=1, max_size=4).filter(lambda key: key not in RESERVED_KEYS)


@st.composite
def full_states(draw: st.DrawFn) -> FullState:
    """Any state that a gather can write: groups, parameters without state, kinds, loose state, several classes."""
    fqns = draw(st.permutations(FQNS))[: draw(st.integers(0, len(FQNS)))]
    num_groups = draw(st.integers(1, 3))
    group_of = {fqn: draw(st.integers(0, num_groups - 1)) for fqn in fqns}
    fqns = sorted(fqns, key=group_of.__getitem__)  # in the order of ids
    state = {
        fqn: draw(st.dictionaries(st.sampled_from(["step", "exp_avg", "x"]), VALUES, max_size=3))
        for fqn in fqns
        if draw(st.booleans())
    }
    kinds = {
        fqn: {name: draw(st.sampled_from(["sharded", "scalar", "placed", "placed 2 0:1", "opaque"])) for name in values}
        for fqn, values in state.items()
    }
    local_ids = {fqn: draw(st.one_of(st.none(), st.integers(0, 3))) for fqn in draw(st.permutations(fqns))}
    uncollected = draw(st.sets(st.sampled_from([i for i in local_ids.values() if i is not None] or [None])))
    other_keys: dict[str, Any] = draw(st.dictionaries(OWN_KEYS, VALUES, max_size=2))
    loose = draw(st.dictionaries(st.sampled_from(["k", "m"]), VALUES, max_size=2)) if state else {}
    same_class = draw(st.booleans())
    return FullState(
        state=state,
        groups=tuple(
            (
                draw(st.dictionaries(st.sampled_from(["lr", "betas"]), VALUES)),
                tuple(f for f in fqns if group_of[f] == g),
            )
            for g in range(num_groups)
        ),
        other_keys=other_keys | ({NON_PARAM_STATE: loose} if loose else {}),
        uncollected=frozenset(fqn for fqn, i in local_ids.items() if i is not None and i in uncollected),
        local_ids=local_ids,
        unknown_order=draw(st.sampled_from(["", "nobody knows"])),
        classes=draw(
            st.sampled_from([(), tuple("Adam" if same_class or not g % 2 else "SGD" for g in range(num_groups))])
        ),
        kinds=kinds,
        num_padded=[[0, 1]],
    )


def names_of(state: FullState) -> Names:
    return Names(groups=tuple(fqns for _, fqns in state.groups), aliases={})


class RoundTripTest(unittest.TestCase):
    @settings(deadline=None, max_examples=50)
    @given(full_states(), st.sampled_from(["id", "name"]))
    def test_what_is_written_is_read(self, state: FullState, key_by: Any) -> None:
        full = write(state, key_by)
        normalized = normalize(full, names_of(state))
        check_same("read", vars(replace(normalized, fqn_of={})), vars(state))
        of_fairscale = {normalized.fqn_of[key]: local_id for key, local_id in full["param_id_map"].items()}
        wanted = {fqn: i if fqn in state.state else None for fqn, i in state.local_ids.items()}
        check_same("ids of what has state, for fairscale's reader", of_fairscale, wanted)
        check_same("the keys", list(normalized.fqn_of.values()), [fqn for _, fqns in state.groups for fqn in fqns])
        for name in (
            "local_ids",
            "state",
            "kinds",
        ):  # the order matters: fairscale's reader counts consecutive equal values
            check_same(name, list(getattr(normalized, name)), list(getattr(state, name)))

    @settings(deadline=None, max_examples=50)
    @given(full_states())
    def test_what_is_read_is_written(self, state: FullState) -> None:
        """The same with a conversion to the other key in between."""
        by_id = write(state, "id")
        by_name = write(normalize(by_id, names_of(state)), "name")
        check_same("again", write(normalize(by_name, names_of(state)), "id"), by_id)

    def test_every_reserved_key_is_written(self) -> None:
        """Every key that the reader knows is also written; else it would be lost."""
        state = FullState({"w": {}}, (({}, ("w",)),), {}, unknown_order="so", classes=("SGD",), num_padded=[], kinds={})
        check_same("keys", sorted(write(state, "id")), sorted(RESERVED_KEYS))


def plain() -> dict[str, Any]:
    return {"state": {0: {"step": 1}}, "param_groups": [{"lr": 1, "params": [0]}]}


EXAMPLES: dict[str, Any] = {
    "Flattened": {"state.w.step": 1, "param_groups.w.lr": 1},
    "NoFullDict": {"state": {}},
    "OwnDialect": write(FullState({"w": {"step": 1}}, (({"lr": 1}, ("w",)),), {}, local_ids={"w": 0}), "id"),
    "Fairscale": plain() | {"param_id_map": {0: 0}, "uncollected_local_ids": []},
    "Named": {"state": {"w": {"step": 1}}, "param_groups": [{"lr": 1, "params": ["w"]}]},
    "Plain": plain(),
}


class DialectTest(unittest.TestCase):
    def test_every_dialect_has_an_example(self) -> None:
        self.assertEqual([type(dialect).__name__ for dialect in DIALECTS], list(EXAMPLES))

    @parameterized.expand(list(EXAMPLES))
    def test_it_is_recognised_and_read(self, name: str) -> None:
        """A dict's own dialect is the first that recognises it; all dialects but one give the same state."""
        given_dict, before = EXAMPLES[name], copy.deepcopy(EXAMPLES[name])
        first = next(dialect for dialect in DIALECTS if dialect.recognises(given_dict))
        self.assertEqual(type(first).__name__, name)
        names = Names((("w",),), {}, unit_order=("w",))
        if name == "NoFullDict":
            with self.assertRaisesRegex(StateError, "no param_groups"):
                normalize(given_dict, names)
            return
        normalized = normalize(given_dict, names)
        check_same("state", normalized.state, {"w": {"step": 1}})
        check_same("groups", normalized.groups, (({"lr": 1}, ("w",)),))
        listing = {"Flattened": "other", "Named": "other", "Fairscale": "units"}
        self.assertEqual(normalized.listing, listing.get(name, "ids"))
        check_same("what came in", given_dict, before)

    def test_ids_of_our_own_dict_without_names_count_as_the_optimizer_does(self) -> None:
        """The ids of such a dict do not count fairscale's units, although the dict has fairscale's keys too."""
        full = write(FullState({"a": {"step": 1}}, (({}, ("a", "b")),), {}, local_ids={"b": 0, "a": 1}), "id")
        del full["fqns"], full["param_groups"][0]["param_names"]
        normalized = normalize(full, Names((("a", "b"),), {}, unit_order=("b", "a")))
        check_same("state", normalized.state, {"a": {"step": 1}})

    def test_what_ranks_of_fairscale_have_listed(self) -> None:
        """One value of each rank for the last original of a unit: all originals get it, unless the ranks differ."""
        names = Names((("a", "b"),), {}, unit_order=("a", "b"))
        full: dict[str, Any] = plain() | {"param_id_map": {0: 0, 1: 0}, "uncollected_local_ids": []}
        full["param_groups"] = [{"lr": 1, "params": [0, 1]}]
        for steps in ((7.0, 7.0), (7.0, 8.0)):
            listed = [torch.tensor(step) for step in steps]
            full["state"] = {0: {"exp_avg": torch.ones(2)}, 1: {"exp_avg": torch.ones(3), "step": listed}}
            if steps[0] != steps[1]:
                with self.assertRaisesRegex(StateError, r"step differs between the ranks .*\[7.0, 8.0\]"):
                    normalize(full, names)
            else:
                state = normalize(full, names).state
                self.assertEqual([float(state[fqn]["step"]) for fqn in "ab"], [7.0, 7.0])

    def test_ids_that_nobody_knows(self) -> None:
        """A dict by name that was made by ids again, without its names, says itself why ids cannot count."""
        full = plain() | {"unknown_order": "its stages are apart", "local_ids": {0: 0}}
        with self.assertRaisesRegex(StateError, "its stages are apart"):
            normalize(full, Names((("w",),), {}))
        with self.assertRaisesRegex(StateError, "of the live optimizer: .*key_by='name'"):
            normalize(plain(), Names((("w",),), {}, unknown_order="of the live optimizer"))

    def test_a_parameter_under_two_names(self) -> None:
        full = {"state": {"a": {"step": 1}}, "param_groups": [{"params": ["a", "tied"]}]}
        with self.assertRaisesRegex(
            StateError, r"a: the full dict lists this parameter under several keys, \['a', 'tied'\]"
        ):
            normalize(full, Names((("a", "b"),), {"tied": "a"}))

    def test_the_last_one_recognises_everything(self) -> None:
        self.assertTrue(dialects.DIALECTS[-1].recognises({}))


if __name__ == "__main__":
    unittest.main()
