"""Names of an optimizer are looked at without those of the weights: a program's hooks may have cut the weights alone."""

from __future__ import annotations

import pytest

from fsdp_optim import StateError, View
from fsdp_optim.checkpoint.views import Through

VIEW = View("w13", "(a + b) c", {"w1": "a c", "w3": "b c"}, a=2, b=2)
SHAPES = {"w13": (4, 3), "w1": (2, 3), "w3": (2, 3), "other": (5,)}


@pytest.mark.parametrize("view", [VIEW, VIEW.inverse], ids=["split", "joined"])
@pytest.mark.parametrize("listed", [["w13", "other"], ["w1", "w3", "other"], ["other"], []], ids=str)
def test_names_of_one_list_alone_are_no_clash(view, listed):
    seen = Through.of([view]).find("here", SHAPES, listed)
    assert set(seen.split if view is VIEW else seen.joined) == {"w13"}


@pytest.mark.parametrize(("view", "words"), [(VIEW, "w1: two parameters"), (VIEW.inverse, "w13: is in the checkpoint")])
@pytest.mark.parametrize("listed", [None, list(SHAPES), ["w13", "w1"]], ids=str)
def test_names_of_one_list_that_would_be_one_are_refused(view, words, listed):
    with pytest.raises(StateError, match=words):
        Through.of([view]).find("here", SHAPES, listed)
