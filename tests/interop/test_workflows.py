"""The ways of users of sharded training, from beginning to end: train, save in the usual way, resume elsewhere, and train on.

The oracle is the run that never stopped, in one process without a wrapper.
"""

from __future__ import annotations

import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import boto3
import pytest
import torch
import torch.distributed as dist
from kit import dcp as dcp_layouts
from kit.compare import check_same
from kit.folders import InFolder
from kit.language_model import LanguageModel, adamw, check_close, train, two_groups, unbroken
from kit.optimizers import stepped
from kit.options import as_options
from kit.pretrained import build, tensors_of
from kit.servers import new_bucket, shared
from kit.tables import each
from kit.wrapping import cpu
from kit.wraps import WRAPPERS
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP

import fsdp_optim
from fsdp_optim.testing import run_on_ranks

LOADED = ("kit.loaded.hugging_face",)
BEFORE, AFTER = 3, 3  # steps


def resume(place: Any, wrapper: str, **options: Any) -> None:
    """Load into a new model in any wrapper, check every bit, and train on."""
    with cpu():
        model = WRAPPERS[wrapper](LanguageModel())
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        optim = adamw(model.parameters())
        fsdp_optim.load(
            place, model, optim, **as_options(fsdp_optim.LoadOptions, **options, compare=True, progress=False)
        )
        check_close(wrapper, train(model, optim, range(BEFORE, BEFORE + AFTER)), unbroken(BEFORE + AFTER)[BEFORE:])


# ------------------------------------------------------------------------------------------ torch FSDP1's tutorial


def save_as_in_the_tutorial(root: Path, orig: bool) -> None:
    """Full state dicts on rank 0, on the CPU, by torch's own calls; one file, and one for each."""
    model = WRAPPERS["FSDP1 orig" if orig else "FSDP1 flat"](LanguageModel())
    optim = adamw(model.parameters())
    train(model, optim, range(BEFORE))
    with TorchFSDP.state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(
            offload_to_cpu=False, rank0_only=True
        ),  # True gives freed and shared memory for CPU tensors
        FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=True),
    ):
        weights = model.state_dict()
        state = TorchFSDP.optim_state_dict(model, optim) if orig else TorchFSDP.full_optim_state_dict(model, optim)
    if dist.get_rank() == 0:
        torch.save({"model": weights, "optimizer": state, "step": BEFORE}, root / "both.pt")
        (root / "folder").mkdir()
        torch.save(weights, root / "folder" / "model.pt")
        torch.save(state, root / "folder" / "optim.pt")


# ------------------------------------------------------------------------------------------ asynchronous, to a bucket


def save_asynchronously(url: str, options: dict[str, Any]) -> None:
    """Sharded saves in the background while training continues; then one whole checkpoint with Hugging Face's config."""
    with cpu():
        model = WRAPPERS["FSDP2"](LanguageModel())
        optim = adamw(model.parameters())
        handles = []
        for step in range(1, BEFORE + 1):
            train(model, optim, range(step - 1, step))
            place = f"{url}/step-{step}"
            handles.append(
                fsdp_optim.async_save(place, model, optim, step=step, **as_options(fsdp_optim.SaveOptions, **options))
            )
        train(model, optim, range(BEFORE, BEFORE + 1))  # what is written is the snapshot
        for handle in handles:
            handle.wait()


def save_pretrained(url: str, options: dict[str, Any]) -> None:
    model = WRAPPERS["FSDP1 flat"](build("gpt2, tied"))
    fsdp_optim.save(url, model, stepped(model), **as_options(fsdp_optim.SaveOptions, **options, max_file_size=3000))


# ------------------------------------------------------------------------------------------ streaming, groups, no flattening


def stream_groups(root: Path) -> None:
    """Cases without support in fairscale's own gather: several groups, units that are not flattened, one parameter at a time."""
    with cpu():
        model = WRAPPERS["fairscale non-flat"](LanguageModel())
        optim = two_groups(model)
        losses = train(model, optim, range(BEFORE))
        check_close("fairscale", losses, unbroken(BEFORE, two_groups))
        full = fsdp_optim.gather_full_optim_state_dict(model, optim, recipient_rank=1, key_by="name")
        streamed = dict(
            fsdp_optim.iter_full_optim_state(
                model, optim, recipient_rank=1, options=fsdp_optim.CallOptions(bucket_nbytes=256)
            )
        )
        if dist.get_rank() == 1:
            assert full is not None
            check_same("streamed", streamed, {name: full["state"][name] for name in streamed})
            check_same("names", sorted(streamed), sorted(name for name, _ in LanguageModel().named_parameters()))
            check_same("decay", [group["weight_decay"] for group in full["param_groups"]], [0.1, 0.0])
        weights = fsdp_optim.gather_full_model_state_dict(model, recipient_rank=1)
        other = WRAPPERS["FSDP2"](LanguageModel())
        optim = two_groups(other)
        shard = fsdp_optim.scatter_full_optim_state_dict(other, optim, full, source_rank=1)
        fsdp_optim.load_optim_state_dict(optim, shard)
        fsdp_optim.scatter_full_model_state_dict(other, weights, source_rank=1)
        wanted = unbroken(BEFORE + AFTER, two_groups)[BEFORE:]
        check_close("FSDP2", train(other, optim, range(BEFORE, BEFORE + AFTER)), wanted)


# ------------------------------------------------------------------------------------------ remote, with a cache


def save_as_olmo_core(root: Path) -> None:
    """A folder of torch.distributed.checkpoint in the layout of OLMo-core, by torch's own calls."""
    model = WRAPPERS["FSDP2"](LanguageModel())
    optim = adamw(model.parameters())
    train(model, optim, range(BEFORE))
    dcp_layouts.olmo_core(SimpleNamespace(model=model, optim=optim), root / "step3")  # type: ignore[arg-type]


class WorkflowsTest(InFolder):
    root: Path

    def test_the_tutorial_of_fsdp1(self) -> None:
        """Its files resume at another world size, under FSDP2 and under every other wrapper."""
        for orig in (False, True):
            with self.subTest(orig=orig), tempfile.TemporaryDirectory() as folder:
                root = Path(folder)
                run_on_ranks(save_as_in_the_tutorial, 2, root, orig)
                in_one_file, in_folder = root / "both.pt", root / "folder"
                run_on_ranks(
                    each, 3, resume, [(in_one_file, "FSDP2"), (in_one_file, "FSDP1 flat"), (in_folder, "FSDP2")]
                )
                run_on_ranks(resume, 1, in_one_file, "plain")
                run_on_ranks(resume, 2, in_one_file, "fairscale flat")
                self.assertEqual(fsdp_optim.load(root / "both.pt").state["step"], BEFORE)

    @pytest.mark.slow  # test_s3_checkpoints.py and test_checkpoint_hugging_face.py have its two halves in `make test-all`
    def test_asynchronous_to_a_bucket(self) -> None:
        """Sharded asynchronous saves resume at another shard degree; a whole checkpoint is opened by Hugging Face."""
        options = shared("moto")
        bucket = f"s3://{new_bucket(options)}"
        asked = {"storage_options": options, "progress": False}
        run_on_ranks(save_asynchronously, 2, f"{bucket}/run", asked)
        newest = fsdp_optim.latest(f"{bucket}/run", storage_options=options)
        self.assertEqual(newest, f"{bucket}/run/step-{BEFORE}")
        for size, wrapper in ((3, "FSDP2"), (1, "plain")):
            run_on_ranks(resume, size, newest, wrapper, storage_options=options)
        run_on_ranks(save_pretrained, 2, f"{bucket}/whole", asked)
        folder = self.root / "whole"
        download(f"{bucket}/whole", folder, options)
        wanted = build("gpt2, tied")
        wanted.config.save_pretrained(folder)
        stepped(wanted)
        reloaded = type(wanted).from_pretrained(folder)
        check_same("weights", tensors_of(reloaded), tensors_of(wanted))

    def test_remote_reads_through_a_cache(self) -> None:
        """A checkpoint of torch.distributed.checkpoint in a bucket: the second load reads no elements from the bucket."""
        run_on_ranks(save_as_olmo_core, 2, self.root)
        options = shared("moto")
        bucket = new_bucket(options)
        client = client_of(options)
        for file in (path for path in (self.root / "step3").rglob("*") if path.is_file()):
            client.upload_file(str(file), bucket, f"run/step3/{file.relative_to(self.root / 'step3')}")
        asked = {"storage_options": options, "local_cache": self.root / "cache"}
        for size, wrapper in ((3, "FSDP1 flat"), (2, "FSDP2")):
            run_on_ranks(resume, size, f"s3://{bucket}/run/step3", wrapper, **asked)
        kept = sum(file.stat().st_size for file in (self.root / "cache").rglob("*") if file.is_file())
        elements = sum(file.stat().st_size for file in (self.root / "step3").rglob("*.distcp"))
        self.assertGreater(kept, elements // 2)
        for file in (self.root / "step3").rglob("*.distcp"):  # the cache knows the objects by their versions
            client.upload_file(str(file), bucket, f"run/step3/{file.relative_to(self.root / 'step3')}")
        run_on_ranks(resume, 1, f"s3://{bucket}/run/step3", "plain", **asked)

    def test_streaming_groups_and_no_flattening(self) -> None:
        run_on_ranks(stream_groups, 2, self.root)


def client_of(options: dict[str, Any]) -> Any:
    known = {key: options[key] for key in ("endpoint_url", "region_name", "aws_access_key_id", "aws_secret_access_key")}
    return boto3.Session().client("s3", **known)


def download(url: str, folder: Path, options: dict[str, Any]) -> None:
    """The objects under a prefix as files, by boto3 alone."""
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    client = client_of(options)
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{prefix}/")
    for entry in (entry for page in pages for entry in page["Contents"]):
        file = folder / entry["Key"].removeprefix(f"{prefix}/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(client.get_object(Bucket=bucket, Key=entry["Key"])["Body"].read())


if __name__ == "__main__":
    unittest.main()
