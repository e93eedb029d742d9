"""Mistakes at the command line: each is exit code 2, and one line that names the options of the command."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from kit.commands import called, fill, model_of
from safetensors.torch import load_file

QUICK = ["--quiet", "--not-durable"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    fill(folder)
    for seed in range(2):
        model = model_of()
        for param in model.parameters():
            param.data += seed
        optim = torch.optim.Adam(model.parameters())
        model(torch.ones(3, 6)).sum().backward()
        optim.step()
        torch.save({"model": model.state_dict(), "optimizer": optim.state_dict()}, folder / f"by-id-{seed}.pt")
    (folder / "names.txt").write_text("\n".join(name for name, _ in model.named_parameters()))
    return folder


MISTAKES = (
    ("diff {own} {own} --match zzz", "--match 'zzz': fits no name of a value"),
    ("diff {own} {own} --tolerance -1", "--tolerance is a relative norm"),
    ("show {own} 0.weight --bins 0", "--bins is a number of bins"),
    ("average {own} -o {out}", "two or more checkpoints"),
    ("average {own} {own} -o {out} --weights 1,2,3", "--weights has 3 numbers"),
    ("average {own} {own} -o {out} --weights 1,-1", "--weights must be finite and above 0"),
    ("average {own} {own} -o {out} --weights 1e308,1e308", "--weights must be numbers with a finite sum"),
    ("average {ids} {ids} -o {out} --moments average", "give --names, their FQNs in the order of the ids"),
    ("convert {ids} {out}", "give --names, their FQNs in the order of the ids"),
    ("diff {own} {own} --html {run}", "run: is a folder"),
    ("inspect {own} --html {run}", "run: is a folder"),
    ("thin {ids}", "convert writes it as a checkpoint"),
    ("inspect {own} --wrapper ddp", "--wrapper says how ranks hold the checkpoint: give --ranks"),
    ("inspect {own} --units 0", "--units says how ranks hold the checkpoint: give --ranks"),
    ("inspect {own} --ranks 2 --units 0", "--units is for flat parameters"),
    ("inspect {own} --ranks 2 --wrapper fsdp1 --units zz", "--units 'zz': fits the path of no module"),
    ("inspect {own} --ranks 2 --replicated zz", "--replicated 'zz' fits the name of no weight"),
    ("inspect {own} --ranks 1000000000", "is not in the range"),
    ("inspect memory://nothing/here", "there is no checkpoint"),
    ("doctor memory://nothing/here", ""),
)


@pytest.mark.parametrize(("line", "words"), MISTAKES, ids=[line for line, _ in MISTAKES])
def test_a_mistake(root: Path, tmp_path: Path, line: str, words: str) -> None:
    places = {"own": root / "run" / "step-1", "run": root / "run", "ids": root / "by-id-0.pt", "out": tmp_path / "out"}
    code, _, err = called(*(word.format(**places) for word in line.split()))
    assert code == 2
    assert words in err
    assert len(err.splitlines()) == (1 if words else 0)
    assert not any(word in err for word in ("param_names", "model=", "bucket_nbytes"))
    assert not (tmp_path / "out").exists()


def test_a_path_that_looks_like_an_argument_stays_as_it_is(tmp_path: Path) -> None:
    _, _, err = called("convert", tmp_path / "format=dcp" / "names=x", tmp_path / "out")
    assert str(tmp_path / "format=dcp" / "names=x") in err


def test_an_error_about_damage_has_no_argument_of_python(root: Path, tmp_path: Path) -> None:
    damaged = shutil.copytree(root / "run" / "step-1", tmp_path / "damaged")
    data = bytearray((damaged / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (damaged / "model.safetensors").write_bytes(data)
    for words in (["verify"], ["show", "0.weight"], ["convert", tmp_path / "out"]):
        code, _, err = called(words[0], damaged, *words[1:])
        assert code == 1
        assert "the file was damaged" in err
        assert "=" not in err.replace(str(tmp_path), "")


def test_names_of_an_average_by_ids(root: Path, tmp_path: Path) -> None:
    sources = [root / f"by-id-{seed}.pt" for seed in range(2)]
    words = ["--moments", "average", "--names", root / "names.txt", "--json", *QUICK]
    code, out, err = called("average", *sources, "-o", tmp_path / "out", *words)
    assert (code, err) == (0, "")
    assert json.loads(out)["num_averaged"] == 12
    moments = load_file(tmp_path / "out" / "optim.safetensors")
    saved = [torch.load(source)["optimizer"]["state"] for source in sources]
    for index, name in enumerate((root / "names.txt").read_text().split()):
        both = [state[index]["exp_avg_sq"].double() for state in saved]
        assert torch.equal(moments[f"state.{name}.exp_avg_sq"], ((both[0] + both[1]) / 2).float())
