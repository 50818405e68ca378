"""What importers collect of a machine, and the topology file that comes of it."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from topo_opt.topology.device import PathClass
from topo_opt.topology.importers.models import Hints, contradiction, recognise
from topo_opt.topology.library import device_figures, link_figures

_NEARNESS = {name: i for i, name in enumerate(get_args(PathClass))}
_UNFIT = re.compile(r"[^A-Za-z0-9_.-]")


@dataclass(frozen=True)
class Wire:
    """A link by the name of its figures, so many lanes of it, or with a rate of its own (bytes per second and source)."""

    ends: tuple[str, str]
    figures: str | None = None
    lanes: int | None = None
    kind: str | None = None
    rate: tuple[float, str] | None = None


@dataclass
class Sketch:
    """A machine while it is read. `notes` say what the dump left open and what was taken instead."""

    gpus: dict[str, Hints] = field(default_factory=dict)
    nodes: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    wires: list[Wire] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    peer_farthest: tuple[str, str] | None = None

    def node(self, identifier: str, kind: str, model: str | None = None) -> str:
        """Adds a node and returns its id."""
        self.nodes[identifier] = (kind, model)
        return identifier

    def wire(self, a: str, b: str, figures: str, lanes: int | None = None) -> None:
        """Adds a link with figures by name."""
        self.wires.append(Wire((a, b), figures, lanes))

    def wire_at(self, a: str, b: str, kind: str, bytes_per_s: float, source: str) -> None:
        """Adds a link with a rate that the dump gives."""
        self.wires.append(Wire((a, b), kind=kind, rate=(bytes_per_s, source)))

    def note(self, text: str) -> None:
        """Says something once."""
        if text not in self.notes:
            self.notes.append(text)


def to_file(sketch: Sketch, name: str, description: str) -> dict[str, Any]:
    """The content of a topology file; GPUs whose model was not recognised have the figures of `unspecified-gpu`."""
    names = {gpu: recognise(hints) or UNSPECIFIED for gpu, hints in sketch.gpus.items()}
    for gpu, hints in sketch.gpus.items():
        if (said := contradiction(hints)) is not None:
            sketch.note(f"the dump says that {gpu} is a {said}: taken as a {hints.model}, as was asked")
    if unknown := [gpu for gpu, model in names.items() if model == UNSPECIFIED]:
        sketch.note(
            f"the dump does not say which model {_listed(unknown)} {'is' if len(unknown) == 1 else 'are'}: memory and "
            "rates are nominal figures; name the model with --device before planning"
        )
    out: dict[str, Any] = {
        "schema_version": 1,
        "name": name,
        "description": description,
        "compute": list(sketch.gpus),
        "devices": [{"id": gpu, "figures": model} for gpu, model in names.items()],
        "nodes": [
            {"id": identifier, "kind": kind} | ({"model": model} if model else {})
            for identifier, (kind, model) in sketch.nodes.items()
        ],
        "links": [_link(wire) for wire in _merged(sketch.wires)],
    }
    if access := _peer_access(sketch, set(names.values())):
        out["peer_access"] = access
    return out


UNSPECIFIED = "unspecified-gpu"


def identifier_of(text: str, fallback: str) -> str:
    """An id for a topology made of any text."""
    cleaned = _UNFIT.sub("-", text)[:64].strip("-.")
    return cleaned if cleaned[:1].isalpha() else f"{fallback}-{cleaned}"[:64].rstrip("-.")


def _merged(wires: Iterable[Wire]) -> list[Wire]:
    """One link where a dump lists several of the same figures between two ends, such as one line for each NVLink."""
    out: dict[tuple[frozenset[str], str | None], Wire] = {}
    for wire in wires:
        key = (frozenset(wire.ends), wire.figures or wire.kind)
        if (first := out.get(key)) is None:
            out[key] = wire
        elif first.rate is not None and wire.rate is not None:
            out[key] = replace(first, rate=(first.rate[0] + wire.rate[0], first.rate[1]))
        elif first.lanes is not None and wire.lanes is not None:
            out[key] = replace(first, lanes=first.lanes + wire.lanes)
    return list(out.values())


def _link(wire: Wire) -> dict[str, Any]:
    out: dict[str, Any] = {"ends": list(wire.ends)}
    if wire.figures is not None:
        out["figures"] = wire.figures
    if wire.rate is not None:
        out |= {"kind": wire.kind, "bytes_per_s": {"value": wire.rate[0], "source": wire.rate[1]}}
    if wire.lanes is not None:
        out["lanes"] = wire.lanes
    return out


def _peer_access(sketch: Sketch, models: Iterable[str]) -> dict[str, Any] | None:
    of_models = [given for model in sorted(models) if (given := device_figures(model).peer_access)]
    access: dict[str, Any] = of_models[0].model_dump(mode="json", exclude_none=True) if of_models else {}
    if sketch.peer_farthest is not None:
        farthest, source = sketch.peer_farthest
        if "farthest" not in access or _NEARNESS[farthest] < _NEARNESS[access["farthest"]]:
            access |= {"farthest": farthest, "source": source}
    return access or None


def _listed(ids: list[str]) -> str:
    return ", ".join(ids) if len(ids) <= 3 else f"{ids[0]} to {ids[-1]} ({len(ids)} GPUs)"


def nvlink_figures(sketch: Sketch, gpu: str, lanes: int) -> str:
    """Which generation of NVLink a GPU has: that of its model, else of its compute capability, else by what has so many."""
    hints = sketch.gpus[gpu]
    model = recognise(hints)
    if model and (port := device_figures(model).port("nvlink")) and port.figures:
        return port.figures
    for least, figures in (
        (100, "nvlink5"),
        (90, "nvlink4"),
        (86, "nvlink3-ga10x"),
        (80, "nvlink3"),
        (70, "nvlink2"),
    ):
        if hints.capability is not None and hints.capability >= least:
            return figures
    if hints.capability is not None:
        return "nvlink1"
    figures = "nvlink4" if lanes > 12 else "nvlink3" if lanes > 6 else "nvlink2"
    sketch.note(f"nothing in the dump tells the generation of NVLinks: taken as {figures}, by their number")
    return figures


def port_figures(hints: Hints, kind: str, default: str) -> str:
    """The figures of a GPU's links of one kind."""
    model = recognise(hints)
    port = device_figures(model).port(kind) if model else None
    return port.figures if port and port.figures else default


def lanes_of(hints: Hints, kind: str) -> int | None:
    """How many links of a kind a GPU has, None when its model is not known or has none."""
    model = recognise(hints)
    port = device_figures(model).port(kind) if model else None
    return port.count.value if port else None


def lane_rate(figures: str) -> float:
    """Bytes per second of one lane, one direction."""
    return link_figures(figures).bytes_per_s.value
