"""How well the cost model of collectives meets what was measured on a machine.

    python benchmarks/collectives.py [TOPOLOGY] [--points]

For the measured curves of a topology (default h200-x2) it prints the errors of four models: uncalibrated (datasheet figures
and the library's constants), calibrated, calibrated without the point that is predicted, and calibrated without all points
of its size. --points lists every point.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import numpy as np
from rich.console import Console
from rich.table import Table

from topo_opt import topology
from topo_opt.collectives import CollectiveModel
from topo_opt.collectives.correction import RINGS
from topo_opt.topology import Topology

MODELS = ("uncalibrated", "calibrated", "without the point", "without the size")
SETS: dict[str, Callable[[str], bool]] = {
    "all-reduce, all-gather, reduce-scatter": lambda curve: (
        curve in tuple(f"{kind} library" for kind in RINGS)
    ),
    "all-to-all, broadcast": lambda curve: curve in ("all_to_all library", "broadcast library"),
    "on symmetric memory": lambda curve: curve.endswith("shot"),
}
Point = tuple[int, int]  # curve, point


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("topology", nargs="?", default="h200-x2", help="name or file (default: h200-x2)")
    parser.add_argument("--points", action="store_true", help="every point")
    arguments = parser.parse_args()
    machine = topology.load(arguments.topology)
    console = Console(width=120)
    errors = {name: list(_errors(machine, name)) for name in MODELS}
    summary = Table(title=f"{machine.name}: error of the predicted time")
    for column in ("curves", "model", "points", "median", "worst"):
        summary.add_column(column, justify="left" if column in ("curves", "model") else "right")
    for label, belongs in SETS.items():
        for name in MODELS:
            found = [abs(e) for curve, _, _, e in errors[name] if belongs(curve)]
            if found:
                summary.add_row(label, name, str(len(found)), f"{np.median(found):.1%}", f"{max(found):.1%}")
    console.print(summary)
    if arguments.points:
        console.print(_points(errors))


def _points(errors: dict[str, list[tuple[str, int, float, float]]]) -> Table:
    table = Table(title="predicted over measured time, less one")
    for column in ("curve", "bytes", "measured us", *MODELS):
        table.add_column(column, justify="left" if column == "curve" else "right")
    for rows in zip(*errors.values(), strict=True):
        curve, nbytes, seconds, _ = rows[0]
        table.add_row(curve, f"{nbytes}", f"{seconds * 1e6:.1f}", *(f"{row[3]:+.1%}" for row in rows))
    return table


def _errors(machine: Topology, name: str) -> Iterator[tuple[str, int, float, float]]:
    """Curve, bytes, measured seconds and relative error of every point under one of the models."""
    whole = CollectiveModel(machine, calibrated=name != "uncalibrated", symmetric_memory=True)
    assert machine.measured is not None
    for i, curve in enumerate(machine.measured.collectives):
        algorithm = None if curve.algorithm == "library" else curve.algorithm.replace("_", "-")
        for j, point in enumerate(curve.points):
            model = whole
            if name.startswith("without"):
                same = {(i, j)} if name == "without the point" else set(_of_size(machine, i, point.bytes))
                model = CollectiveModel(_without(machine, same), symmetric_memory=True)
            groups = (curve.participants,)
            if algorithm is None:
                cost = _library(model, curve.kind, point.bytes, groups)
            else:
                cost = model.cost(curve.kind, point.bytes, groups, algorithm).seconds
            yield f"{curve.kind} {curve.algorithm}", point.bytes, point.seconds, cost / point.seconds - 1


def _library(model: CollectiveModel, kind: str, nbytes: float, groups: tuple[tuple[str, ...], ...]) -> float:
    names = {c.name for c in model.candidates(kind, groups) if c.curve == "library"}
    return min(model.cost(kind, nbytes, groups, name).seconds for name in names)


def _of_size(machine: Topology, curve: int, nbytes: int) -> Iterator[Point]:
    """All points with which each device sends as much as with this one: a row of the measurement."""
    assert machine.measured is not None
    curves = machine.measured.collectives
    place = [point.bytes for point in curves[curve].points].index(nbytes)
    for i, other in enumerate(curves):
        if place < len(other.points):
            yield i, place


def _without(machine: Topology, dropped: set[Point]) -> Topology:
    assert machine.measured is not None
    curves = []
    for i, curve in enumerate(machine.measured.collectives):
        kept = tuple(point for j, point in enumerate(curve.points) if (i, j) not in dropped)
        if kept:
            curves.append(curve.model_copy(update={"points": kept}))
    measured = machine.measured.model_copy(update={"collectives": tuple(curves)})
    return machine.model_copy(update={"measured": measured})


if __name__ == "__main__":
    main()
