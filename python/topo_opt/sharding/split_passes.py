"""Which passes split a model, by what the user says: a mesh, patterns, or a machine with several devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from topo_opt.errors import OptionError
from topo_opt.passes.base import quote
from topo_opt.sharding.named import parse_mesh, parse_pattern
from topo_opt.topology import Topology

AUTO = "auto"
"""In place of a mesh: the planner's choice."""


def split_passes(
    topology: str,
    machine: Topology,
    mesh: str | None,
    shard: Sequence[str],
    planner: Mapping[str, str] | None = None,
    *,
    wide_sums: bool = False,
) -> tuple[str, ...]:
    """The passes as text; none for a program of one device.

    Args:
        mesh: `data=2,model=4`, the outer axis first; `auto` leaves it to the planner.
        shard: patterns, see `named.parse_pattern`. What they leave open follows from them. Without any the planner chooses.
        planner: more options of `topo-plan-shardings`.
        wide_sums: form sums over devices in f32 where their results are rounded to less.

    Raises:
        OptionError: a mesh or pattern of another form, or one without the other.
        InputError: more places than the machine has devices.
    """
    if mesh is None:
        if shard:
            raise OptionError(
                f"'{shard[0]}' says how a tensor is split, but no mesh was given",
                hint="give a mesh, such as model=2",
            )
        return ()
    for text in shard:
        parse_pattern(text)
    # A process on the CPU is no device of its own: there may be as many as wanted.
    devices = () if machine.primary.kind == "cpu" else tuple(machine.compute)
    if mesh != AUTO:
        parse_mesh(mesh, devices)
    if shard and (mesh == AUTO or planner):
        raise OptionError(
            f"'{shard[0]}' says how a tensor is split where the planner is asked for",
            hint="write it as a pin (--pin), or give a mesh and no options of the planner",
        )
    on = f" topology={quote(topology)}" if devices else ""
    if shard:
        options = f"mesh={quote(mesh)} shard={quote(';'.join(shard))} results=whole{on}"
        chosen = [f"topo-propagate-shardings{{{options}}}"]
    else:
        sums = {"sums": "wide"} if wide_sums else {}
        given = {"topology": topology} | sums | ({} if mesh == AUTO else {"mesh": mesh}) | dict(planner or {})
        options = " ".join(f"{key}={quote(text)}" for key, text in given.items()) + " results=whole"
        chosen = [f"topo-plan-shardings{{{options}}}", "topo-propagate-shardings{results=whole}"]
    # A plan that splits a weight and gathers it saves memory by that, or was told to.
    simplifying = " ".join(part for part in ("" if shard else "hoist=0", on.strip()) if part)
    # Two equal collectives are one; what they read is equal only after the same was computed once.
    simplify = ("cse", "topo-simplify-collectives" + (f"{{{simplifying}}}" if simplifying else ""))
    split = "topo-partition{sums=wide}" if wide_sums else "topo-partition"
    # Products have the same groups only after these were computed once.
    return (
        *chosen,
        split,
        *simplify,
        "topo-sink-foreign-rows",
        "topo-lower-slices",
        "topo-outline-collectives",
    )
