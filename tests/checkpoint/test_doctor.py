"""`doctor` on damaged folders of any tool: what it calls them, what is missing, and that its line of Python loads."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from kit.commands import called, fill, model_of
from safetensors.torch import save_file

import fsdp_optim


@pytest.fixture
def own(tmp_path: Path) -> Path:
    fill(tmp_path)
    return tmp_path / "run" / "step-1"


def seen(path: object, code: int) -> dict[str, object]:
    got, out, err = called("doctor", path, "--json")
    assert (got, err) == (code, "")
    values: dict[str, object] = json.loads(out)
    return values


@pytest.mark.parametrize("kind", ["link", "folder"])
def test_a_file_that_is_none(own: Path, kind: str) -> None:
    file = own / "model.safetensors"
    file.rename(own.parent / "moved")
    if kind == "link":
        file.symlink_to(own.parent / "moved")
    else:
        file.mkdir()
    (problem,) = seen(own, 1)["problems"]  # type: ignore[misc]
    assert problem.startswith(f"{file}: is a link or a folder")


def test_a_save_of_dcp_that_did_not_end(own: Path, tmp_path: Path) -> None:
    fsdp_optim.convert(own, tmp_path / "dcp", format="dcp")
    whole = seen(tmp_path / "dcp", 0)
    assert (whole["kind"], whole["format"]) == ("checkpoint", "dcp")
    (tmp_path / "dcp" / ".metadata").unlink()
    values = seen(tmp_path / "dcp", 1)
    assert values["kind"] == "unfinished"
    assert ".metadata: is missing" in str(values["problems"])


def test_a_damaged_checkpoint_of_dcp(own: Path, tmp_path: Path) -> None:
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(b"x")
    values = seen(tmp_path / "dcp", 1)
    assert (values["kind"], values["complete"], values["format"]) == ("checkpoint", False, "dcp")


@pytest.mark.parametrize("num_there", [0, 1])
def test_files_of_hugging_face_that_are_missing(tmp_path: Path, num_there: int) -> None:
    names = [f"model-0000{part}-of-00002.safetensors" for part in (1, 2)]
    index = {"metadata": {}, "weight_map": {"a": names[0], "b": names[1]}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in names[:num_there]:
        save_file({"a": torch.ones(2)}, tmp_path / name)
    values = seen(tmp_path, 1)
    assert (values["kind"], values["complete"], values["format"]) == ("checkpoint", False, "safetensors")
    assert ("model-00002" if num_there else "model.safetensors.index.json") in str(values["problems"])


def test_nothing_is_there(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing", "memory://no/thing"):
        assert seen(path, 2)["kind"] == "none"


@pytest.mark.parametrize("is_thin", [False, True])
def test_the_line_that_loads(own: Path, is_thin: bool) -> None:
    strange = own.parent.parent / 'it\'s "a" run'
    shutil.copytree(own.parent, strange)
    if is_thin:
        fsdp_optim.thin(strange / "step-1")
    for path, verb in ((strange / "step-1", "load"), (strange, "resume")):
        code, out, _ = called("doctor", path)
        line = re.search(r"to load it: (.*)", out)
        assert code == 0
        assert line is not None
        assert f"fsdp_optim.{verb}(" in line[1]
        model = model_of()
        for param in model.parameters():
            param.data.zero_()
        optim = torch.optim.Adam(model.parameters())
        exec(line[1], {"fsdp_optim": fsdp_optim, "model": model, "optim": optim})
        wanted = model_of().state_dict()
        saved = {name: fsdp_optim.show(own, name, slice=":").elements for name in wanted}
        assert all(torch.equal(tensor, saved[name].view_as(tensor)) for name, tensor in model.state_dict().items())
        assert bool(optim.state) is not is_thin
