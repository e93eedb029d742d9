"""Average: writes one checkpoint with the averages of several, without a model and in bounded memory.

It is a conversion of the last checkpoint whose elements come from all of them: `blending.py` adds, `agreement.py` compares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from fsdp_optim.arguments import check_one_of, is_integer
from fsdp_optim.checkpoint.common.stores import Place
from fsdp_optim.errors import CheckpointError, StateError
from fsdp_optim.formats.base.protocols import Reader
from fsdp_optim.formats.own.format import OURS
from fsdp_optim.offline.combining.agreement import CheckpointValues, check_agreement, differing_plain, text_of
from fsdp_optim.offline.combining.blending import BlendSource
from fsdp_optim.offline.conversion.arguments import ConvertArguments
from fsdp_optim.offline.conversion.convert import opened_on_all, ranks_of_call
from fsdp_optim.offline.conversion.new_files import NewFiles
from fsdp_optim.offline.conversion.source_contents import NamedSource, SourceContents, SourceNaming, name_source
from fsdp_optim.offline.conversion.unit_sources import CheckpointSource
from fsdp_optim.results.offline import AverageResult
from fsdp_optim.transport.agree import all_equal, all_gather_bytes, all_hear, in_turn
from fsdp_optim.transport.base import RankGroup
from fsdp_optim.wire import decode, encode

Moments: TypeAlias = Literal["drop", "average"]
_FEWEST = 2  # checkpoints


@dataclass(frozen=True)
class AverageArguments(ConvertArguments):
    """The arguments of `average`, besides the checkpoints."""

    weights: Sequence[float] | None = None
    moments: Moments = "drop"

    def validate(self) -> None:
        super().validate()
        self.refuse_views("average")
        check_one_of("moments", self.moments, ("drop", "average"))

    def weights_for(self, num: int) -> tuple[float, ...]:
        """Return the weight of each of `num` checkpoints. Raises StateError for weights that are none."""
        if self.weights is None:
            return (1.0,) * num
        given = list(self.weights) if isinstance(self.weights, (list, tuple)) else [None]
        if not all(isinstance(weight, float) or is_integer(weight) for weight in given):
            raise StateError(f"weights must be a list of numbers, one for each checkpoint, not {self.weights!r}")
        if len(given) != num:
            raise StateError(f"weights has {len(given)} numbers, and there are {num} checkpoints: give one for each")
        weights = tuple(float(weight) for weight in given)  # type: ignore[arg-type]
        if not math.isfinite(sum(map(abs, weights))) and all(map(math.isfinite, weights)):
            raise StateError(
                f"weights must be numbers with a finite sum, not {self.weights!r}: divide them by the largest"
            )
        if not all(weight > 0 and math.isfinite(weight) for weight in weights):
            raise StateError(
                f"weights must be finite and above 0, not {self.weights!r}: leave a checkpoint without weight out"
            )
        return weights


def average(sources: Sequence[Place], target: Place, options: AverageArguments) -> AverageResult:
    """Average checkpoints into a new one of this library's own format. Called by all ranks of the process group."""
    group = ranks_of_call(options.call)
    with in_turn(group), all_hear(group):
        options.validate()
        if isinstance(sources, (str, bytes)) or not isinstance(sources, Sequence):
            raise StateError(f"average takes a list of two or more checkpoints, not {sources!r}")
        if len(sources) < _FEWEST:
            given = ", ".join(map(str, sources)) or "none"
            raise StateError(f"an average is of two or more checkpoints, and there is no second one: {given} was given")
        weights = options.weights_for(len(sources))
        with ExitStack() as held:
            readers = [held.enter_context(closing(opened_on_all(group, source, options))) for source in sources]
            return _Average(group, readers, weights, options).run(target)


@dataclass(frozen=True)
class _Average:
    """The average of open checkpoints."""

    group: RankGroup
    readers: Sequence[Reader]
    weights: tuple[float, ...]
    options: AverageArguments

    def run(self, target: Place) -> AverageResult:
        """Compare the checkpoints, and write the new one. Nothing is written where they do not fit together."""
        named = [self._named(reader) for reader in self.readers]
        pairs = zip(self.readers, named, strict=True)
        read = [CheckpointValues.of(*pair, allow_pickle=self.options.allow_pickle) for pair in pairs]
        by_name = [values.with_names_of(read[-1]) for values in read]
        check_agreement(by_name)
        writer = OURS.writer()
        contents = named[-1].contents(writer, allow_pickle=self.options.allow_pickle)
        source = self._source(by_name, contents)
        files = NewFiles.of(self.group, self.readers[-1], contents, OURS, self.options, writer=writer, source=source)
        new = replace(files, doing="averaging")
        identities = [reader.index.identity for reader in self.readers]
        if not all_equal(self.group, "read", f"{identities} {new.compared}".encode()):
            raise StateError(
                f"{new.checkpoint.index.where}: the processes that average it see different checkpoints, or have other options: "
                "give all of them the same paths and options"
            )
        saved = new.run(target)
        names = {key: text_of(name) for name, key in by_name[-1].keys.items()}
        differing = differing_plain(by_name) | self._of_all_ranks({names[key] for key in source.differing})
        return AverageResult(
            path=saved.path,
            sources=tuple(reader.index.where for reader in self.readers),
            weights=tuple(weight / sum(self.weights) for weight in self.weights),
            num_tensors=saved.num_tensors,
            num_averaged=len(source.averaged),
            nbytes=saved.nbytes,
            differing=tuple(sorted(differing)),
        )

    def _named(self, reader: Reader) -> NamedSource:
        """Name the contents of one checkpoint. Raises StateError where its moments are asked for and it has none."""
        options, index = self.options, reader.index
        averages_moments = options.moments == "average"
        if averages_moments and index.optim is None:
            raise StateError(f'{index.where}: has no optimizer: moments="drop" averages the weights alone')
        if not averages_moments and not index.weights:
            raise CheckpointError(f"{index.where}: has no weights to average")
        naming = SourceNaming(options.param_names)
        return name_source(reader, naming, allow_pickle=options.allow_pickle, with_optim=averages_moments)

    def _source(self, by_name: Sequence[CheckpointValues], contents: SourceContents) -> BlendSource:
        """Return the source of elements: each checkpoint by the keys of the last one."""
        last = by_name[-1]
        sources = [
            CheckpointSource(reader, {last.keys[name]: tensor for name, tensor in values.tensors.items()})
            for reader, values in zip(self.readers[:-1], by_name[:-1], strict=True)
        ]
        sources.append(CheckpointSource(self.readers[-1], contents.stored))
        averaged = frozenset(last.keys[name] for name in last.averaged)
        return BlendSource(tuple(sources), self.weights, averaged)

    def _of_all_ranks(self, names: set[str]) -> set[str]:
        """Return the names that any rank has. Called by all ranks."""
        result = all_gather_bytes(self.group, "differing", encode(tuple(sorted(names))).encode())
        return {name for rank in self.group.ranks for name in decode(tuple[str, ...], result.content_of(rank))}
