"""From the short forms of a topology file to a flat topology, remembering where each part came from."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TypeVar

from topo_opt.errors import InputError
from topo_opt.topology.device import Device
from topo_opt.topology.figures import MAX_IDENTIFIER, Rate
from topo_opt.topology.file import FileLink, NamedDevice, TopologyFile
from topo_opt.topology.library import device_figures, link_figures
from topo_opt.topology.schema import MAX_COMPUTE, MAX_DEVICES, MAX_LINKS, MAX_NODES, Link, Node, Topology

Use = TypeVar("Use")
Flat = TypeVar("Flat")
_RANGE = re.compile(r"(.*)\[(\d+)-(\d+)(?::(\d+))?\](.*)")
_POINTER = re.compile(r"/(devices|nodes|links|compute)/(\d+)(.*)")


class Misfit(Exception):
    """A short form that stands for nothing: the JSON pointer and a sentence."""

    def __init__(self, pointer: str, sentence: str):
        super().__init__(pointer, sentence)
        self.pointer, self.sentence = pointer, sentence


@dataclass(frozen=True)
class Origins:
    """For the i-th device, node, link and compute of a flat topology the index in the file."""

    devices: tuple[int, ...]
    nodes: tuple[int, ...]
    links: tuple[int, ...]
    compute: tuple[int, ...]

    def pointer(self, flat: str) -> str:
        """A JSON pointer into the flat topology as one into the file."""
        if match := _POINTER.fullmatch(flat):
            part, index, rest = match.groups()
            return f"/{part}/{getattr(self, part)[int(index)]}{rest}"
        return flat


def expand(file: TopologyFile) -> tuple[Topology, Origins]:
    """The machine of a file; a cluster's network is not built here.

    Raises:
        Misfit: a range that runs backwards, ends that cannot be dealt out, names that the library does not have, or more
            parts than a topology may have.
    """
    devices = _spread(file.devices, "devices", lambda use, at: _devices(use, at), MAX_DEVICES)
    nodes = _spread(
        file.nodes,
        "nodes",
        lambda use, at: (
            Node(id=name, kind=use.kind, model=use.model) for name in names_of(use.id, f"{at}/id")
        ),
        MAX_NODES,
    )
    links = _spread(file.links, "links", lambda use, at: _links(use, at), MAX_LINKS)
    compute = _spread(file.compute, "compute", names_of, MAX_COMPUTE)
    topology = Topology(
        schema_version=1,
        name=file.name,
        description=file.description,
        devices=tuple(device for device, _ in devices),
        nodes=tuple(node for node, _ in nodes),
        links=tuple(link for link, _ in links),
        compute=tuple(name for name, _ in compute),
        peer_access=file.peer_access,
        measured=file.measured,
    )
    parts = (devices, nodes, links, compute)
    return topology, Origins(*(tuple(index for _, index in part) for part in parts))


def names_of(pattern: str, pointer: str) -> list[str]:
    """The ids that a pattern stands for."""
    match = _RANGE.fullmatch(pattern)
    if match is None:
        return [pattern]
    head, first, last, step, tail = match.groups()
    if int(first) > int(last):
        raise Misfit(pointer, f"the range of '{pattern}' runs backwards")
    if int(last) - int(first) >= MAX_NODES:
        raise Misfit(pointer, f"the range of '{pattern}' is longer than {MAX_NODES}")
    if len(f"{head}{int(last)}{tail}") > MAX_IDENTIFIER:
        raise Misfit(pointer, f"'{pattern}' stands for ids longer than {MAX_IDENTIFIER}")
    return [f"{head}{i}{tail}" for i in range(int(first), int(last) + 1, int(step or 1))]


def link_between(ends: tuple[str, str], name: str, lanes: int | None = None) -> Link:
    """A link with the figures of `hw_topologies/links/<name>.json`, so many lanes of it.

    Raises:
        InputError: there are no figures of that name.
    """
    one, times = link_figures(name), lanes or 1
    return Link(
        ends=ends,
        kind=one.kind,
        bytes_per_s=_times(one.bytes_per_s, times),
        sustained_bytes_per_s=one.sustained_bytes_per_s and _times(one.sustained_bytes_per_s, times),
        latency_ns=one.latency_ns,
        lanes=lanes,
    )


def _times(rate: Rate, lanes: int) -> Rate:
    return rate if lanes == 1 else Rate(value=rate.value * lanes, source=f"{rate.source}; {lanes} lanes")


def _spread(
    uses: Sequence[Use], part: str, parts_of: Callable[[Use, str], Iterable[Flat]], most: int
) -> list[tuple[Flat, int]]:
    out: list[tuple[Flat, int]] = []
    for index, use in enumerate(uses):
        for flat in parts_of(use, f"/{part}/{index}"):
            out.append((flat, index))
            if len(out) > most:
                raise Misfit(f"/{part}", f"are more than {most}")
    return out


def _devices(use: NamedDevice | Device, pointer: str) -> Iterator[Device]:
    if isinstance(use, Device):
        yield use
        return
    try:
        figures = device_figures(use.figures)
    except InputError as error:
        raise Misfit(f"{pointer}/figures", str(error)) from None
    for name in names_of(use.id, f"{pointer}/id"):
        yield Device.model_construct(id=name, **figures.__dict__)


def _links(use: FileLink, pointer: str) -> Iterator[Link]:
    pairs: Iterator[tuple[str, str]]
    if use.among is not None:
        pairs = combinations(names_of(use.among, f"{pointer}/among"), 2)
    elif use.ends is not None:
        pairs = _dealt(use.ends, pointer)
    template = _template(use, pointer)
    for pair in pairs:
        yield template.model_copy(update={"ends": pair})


def _template(use: FileLink, pointer: str) -> Link:
    if use.figures is not None:
        try:
            return link_between(("a", "b"), use.figures, use.lanes)
        except InputError as error:
            raise Misfit(f"{pointer}/figures", str(error)) from None
    figures = {field: getattr(use, field) for field in Link.model_fields if field != "ends"}
    return Link(ends=("a", "b"), **figures)


def _dealt(ends: tuple[str, str], pointer: str) -> Iterator[tuple[str, str]]:
    if "[" not in ends[0] and "[" not in ends[1]:
        yield ends
        return
    first, second = (names_of(end, f"{pointer}/ends/{side}") for side, end in enumerate(ends))
    more, fewer = max(len(first), len(second)), min(len(first), len(second))
    if more % fewer:
        raise Misfit(f"{pointer}/ends", f"{len(first)} and {len(second)} ends cannot be dealt out evenly")
    for i in range(more):
        yield first[i * len(first) // more], second[i * len(second) // more]
