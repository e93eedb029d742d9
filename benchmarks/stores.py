"""Save to and load from an object store: fsdp_optim beside bare uploads and ranged reads of the same bytes, and beside its peers.

    python benchmarks/stores.py [--rounds 3] [--worlds 2 4] [--limit MB/s]

The server is `rclone serve s3` over a folder, on loopback. The model has 12 blocks with 100 M parameters; weights and Adam
state in fp32 are 1.1 GiB. "bare parts": every rank uploads its share of as many bytes from memory, in parts of the same size,
with as many threads, and no plan, table of checksums or manifest. "bare reads": every rank reads its share by ranges into fresh
memory; "bare reads of own rows": by the ranges in which its rows of the larger tensors lie. The contestants run in turn in the
same processes. Extra memory is the highest resident size during the call, over that before it.

The server takes and gives as much as the processor lets it, over one connection as over many. Large stores limit each connection:
`--limit` models that, by a proxy in front of the server that lets so many MB/s pass over each.

An answer is waited for as long as it takes: where a machine is so loaded that none comes in a minute, boto3 would send the part
once more, beside the first attempt, which this server may answer with InvalidPart at the end of the upload.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from checkpoint import Subject, in_fairscale, in_fsdp2, rows_of
from kit.proxy import Proxy
from kit.servers import new_bucket, port_of, serving
from measure import Series, run_in_turn, table

import fsdp_optim
from fsdp_optim.buckets.s3.bucket import S3Bucket
from fsdp_optim.testing import fairscale_on_cpu, run_on_ranks

PART_NBYTES, READ_NBYTES, LEAST_NBYTES = 5 << 20, 8 << 20, 1 << 20
WRITERS, READERS = 10, 16  # threads: as many requests as ours has under way, with the usual bucket_nbytes
PATIENCE = {"read_timeout": 3600, "connect_timeout": 60}  # seconds
LARGE_BUCKET_NBYTES = 256 << 20
MODEL = "big"  # of gather.py: 12 blocks

Options = dict[str, Any]


def share(nbytes: int, part_nbytes: int = PART_NBYTES) -> list[tuple[int, int]]:
    """This rank's parts of so many bytes, as (number, length)."""
    num = -(-nbytes // part_nbytes)
    first, last = (num * (dist.get_rank() + k) // dist.get_world_size() for k in (0, 1))
    return [(number, min(part_nbytes, nbytes - number * part_nbytes)) for number in range(first, last)]


def bare_parts(bucket: S3Bucket, memory: torch.Tensor, nbytes: int) -> None:
    upload: list[Any] = [bucket.begin_upload("bare/data") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(upload)
    view = memoryview(memory.numpy())

    def put(one: tuple[int, tuple[int, int]]) -> tuple[int, str]:
        index, (number, length) = one
        return number, bucket.put_part("bare/data", upload[0], number, view[index * PART_NBYTES :][:length])

    with ThreadPoolExecutor(WRITERS) as pool:
        receipts = list(pool.map(put, enumerate(share(nbytes))))
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(receipts, by_rank if dist.get_rank() == 0 else None)
    if dist.get_rank() == 0:
        ordered = dict(receipt for its in by_rank for receipt in its)
        bucket.end_upload("bare/data", upload[0], [ordered[number] for number in range(len(ordered))])
    dist.barrier()


def own_ranges(model: Iterable[DTensor]) -> list[tuple[int, int]]:
    """(start, length) of this rank's rows of every large tensor, weights and both moments, if these lay one after the other."""
    ranges, at = list[tuple[int, int]](), 0
    for param in [*model] * 3:
        share = 4 * -(-param.shape[0] // dist.get_world_size()) * param[0].numel()
        start, stop = (min(share * (dist.get_rank() + k), 4 * param.numel()) for k in (0, 1))
        if 4 * param.numel() > LEAST_NBYTES:
            ranges += [(at + first, min(READ_NBYTES, stop - first)) for first in range(start, stop, READ_NBYTES)]
        at += 4 * param.numel()
    return ranges


def bare_reads(bucket: S3Bucket, ranges: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Read ranges of an object, (start, length), one after the other into fresh memory."""
    starts = list(accumulate((length for _, length in ranges), initial=0))
    memory = torch.empty(starts[-1], dtype=torch.uint8)
    view = memoryview(memory.numpy())

    def read(place: int, start: int, length: int) -> None:
        bucket.read_into("bare/data", [view[place : place + length]], start)

    with ThreadPoolExecutor(READERS) as pool:
        list(pool.map(read, starts, *zip(*ranges, strict=True)))
    return memory


def gathered_upload(subject: Subject, options: Options, bucket: str) -> None:
    """Rank 0 gathers with torch, writes a file, and uploads it with boto3's own `upload_file`."""
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model, optim = get_state_dict(subject.model, subject.optim, options=full)
    if dist.get_rank() == 0:
        with tempfile.NamedTemporaryFile() as file:
            torch.save({"model": model, "optim": optim}, file.name)
            client_of(options).upload_file(file.name, bucket, "gathered/all.pt")


def client_of(options: Options) -> Any:
    import boto3

    given = {name: value for name, value in options.items() if name not in ("retry_seconds", "part_nbytes")}
    return boto3.client("s3", **given)


def dcp_calls(new: Subject, subject: Subject, options: Options, bucket: str) -> dict[str, Callable[[], object]]:
    """DCP through fsspec, where s3fs works here; nothing otherwise."""
    try:
        import torch.distributed.checkpoint as dcp
        from s3fs import S3FileSystem
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
        from torch.distributed.checkpoint.state_dict import set_state_dict

        keys = {"key": options["aws_access_key_id"], "secret": options["aws_secret_access_key"]}
        place = {**keys, "client_kwargs": {"endpoint_url": options["endpoint_url"]}}
        S3FileSystem(**place).ls(bucket)
    except Exception as error:
        if dist.get_rank() == 0:
            print(f"DCP through fsspec cannot run here: {type(error).__name__}: {error}", flush=True)
        return {}

    def save() -> None:
        model, optim = get_state_dict(subject.model, subject.optim)
        writer = FsspecWriter(f"s3://{bucket}/dcp", **place)
        dcp.save({"model": model, "optim": optim}, storage_writer=writer)

    def load() -> None:
        model, optim = get_state_dict(new.model, new.optim)
        saved = {"model": model, "optim": optim}
        dcp.load(saved, storage_reader=FsspecReader(f"s3://{bucket}/dcp", **place))
        set_state_dict(new.model, new.optim, model_state_dict=saved["model"], optim_state_dict=saved["optim"])

    return {"save": save, "load": load}


def contest(
    options: Options, bucket: str, rounds: int, warm_up: bool, only: Sequence[str]
) -> tuple[dict[str, Series], dict[str, Series]]:
    """Runs on every rank: saves, then loads at the same number of ranks."""
    from botocore.config import Config

    logging.getLogger("fsdp_optim").setLevel(logging.ERROR)
    options = {**options, "config": Config(**PATIENCE)}
    with fairscale_on_cpu():
        subject, fairscale = Subject(in_fsdp2, MODEL), Subject(in_fairscale, MODEL)
        new = Subject(in_fsdp2, MODEL, step=False)
        theirs = S3Bucket(bucket, options)
        theirs.look("nothing")  # connects
        nbytes = 3 * 4 * sum(param.numel() for param in subject.model.parameters())
        memory = torch.ones(sum(length for _, length in share(nbytes)), dtype=torch.uint8)

        def save(one: Subject, name: str, **more: Any) -> None:
            url = f"s3://{bucket}/{name}/step"
            fsdp_optim.save(
                url,
                one.model,
                one.optim,
                overwrite=True,
                options=fsdp_optim.SaveOptions(storage_options=options, progress=False, **more),
            )

        def load(**more: Any) -> None:
            url = f"s3://{bucket}/ours/step"
            fsdp_optim.load(
                url,
                new.model,
                new.optim,
                options=fsdp_optim.LoadOptions(storage_options=options, progress=False, **more),
            )

        peers = dcp_calls(new, subject, options, bucket)
        saves: dict[str, Callable[[], object]] = {
            "fsdp_optim, FSDP2": lambda: save(subject, "ours"),
            "fsdp_optim, FSDP2, bucket_nbytes 256 MiB": lambda: save(
                subject, "ours", bucket_nbytes=LARGE_BUCKET_NBYTES
            ),
            "fsdp_optim, fairscale": lambda: save(fairscale, "ours-fairscale"),
            "bare parts": lambda: bare_parts(theirs, memory, nbytes),
            "torch's gather + upload_file": lambda: gathered_upload(subject, options, bucket),
        }
        loads: dict[str, Callable[[], object]] = {
            "fsdp_optim, FSDP2": load,
            "fsdp_optim, FSDP2, verify=False": lambda: load(verify=False),
            "bare reads": lambda: bare_reads(
                theirs, [(one * READ_NBYTES, length) for one, length in share(nbytes, READ_NBYTES)]
            ),
            "bare reads of own rows": lambda: bare_reads(theirs, own_ranges(new.model.parameters())),
        }
        if peers:
            saves["DCP through fsspec"], loads["DCP through fsspec"] = peers["save"], peers["load"]
        saves, loads = (
            {name: call for name, call in calls.items() if not only or name in only} for calls in (saves, loads)
        )
        saved = run_in_turn(saves, rounds, warm_up=warm_up)
        memory.resize_(0)
        return saved, run_in_turn(loads, rounds, before=lambda name: new.optim.state.clear(), warm_up=warm_up)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--limit", type=float, default=None, help="MB/s over each connection, by a proxy")
    parser.add_argument("--cold", action="store_true", help="no round before those that count")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WHO", help="the names of some contestants, as in the table"
    )
    asked = parser.parse_args()
    header = ("call", "who", "median s", "range s", "time / bare", "most extra MiB on a rank")
    for world_size in asked.worlds:
        with ExitStack() as stack:
            options = {**stack.enter_context(serving("rclone")), "part_nbytes": PART_NBYTES}
            bucket, limited = new_bucket(options), ""
            if asked.limit is not None:
                proxy = stack.enter_context(Proxy(port_of(options), nbytes_per_second=1e6 * asked.limit))
                options, limited = proxy.options(options), f", {asked.limit:g} MB/s a connection"
            by_rank = run_on_ranks(
                contest, world_size, options, bucket, asked.rounds, not asked.cold, asked.only, timeout=3600.0
            )
            rows = rows_of(f"save, {world_size} ranks{limited}", [saves for saves, _ in by_rank], "bare parts")
            rows += rows_of(
                f"load, {world_size} ranks{limited}", [loads for _, loads in by_rank], "bare reads of own rows"
            )
            print(table(header, rows), flush=True)


if __name__ == "__main__":
    main()
