"""`topo-hw list`: lists the topologies of the package, and with --devices or --links the figures they are made of."""

import argparse

from topo_opt.tools.hw_tables import Table, print_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `topo-hw list`."""
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--devices", action="store_true", help="the models that files and --device can name")
    what.add_argument("--links", action="store_true", help="the links that files can name")


def run(arguments: argparse.Namespace) -> int:
    """Prints the list; returns the exit code."""
    print_table(_devices() if arguments.devices else _links() if arguments.links else _topologies())
    return 0


def _topologies() -> Table:
    from topo_opt import topology

    rows = []
    for name in topology.names():
        machine = topology.load(name)
        rows.append((name, str(len(machine.compute)), machine.primary.model, machine.description))
    return Table(("name", "devices", "model", ""), tuple(rows), right=frozenset({1}))


def _devices() -> Table:
    from topo_opt.topology import library

    rows = []
    for name in library.device_models():
        figures = library.device_figures(name)
        rates = {key: f"{rate.value / 1e12:.4g}" for key, rate in figures.peak_ops_per_s.items()}
        memory = figures.memory
        capacity, rate = memory.capacity_bytes.value / 1e9, memory.peak_bytes_per_s.value / 1e12
        cores = str(figures.cores.count.value)
        rows.append(
            (
                name,
                figures.model,
                f"{capacity:.4g}",
                f"{rate:.4g}",
                cores,
                rates.get("bf16", "-"),
                rates.get("f8", "-"),
            )
        )
    head = ("name", "model", "GB", "TB/s", "cores", "bf16 Tops/s", "f8 Tops/s")
    return Table(head, tuple(rows), right=frozenset(range(2, 7)))


def _links() -> Table:
    from topo_opt.topology import library

    rows = []
    for name in library.link_kinds():
        figures = library.link_figures(name)
        sustained = figures.sustained_bytes_per_s
        reached = f"{sustained.value / 1e9:.4g}" if sustained else "-"
        rows.append(
            (
                name,
                figures.kind,
                f"{figures.bytes_per_s.value / 1e9:.4g}",
                reached,
                figures.bytes_per_s.source,
            )
        )
    head = ("name", "kind", "GB/s a lane", "sustained", "source")
    return Table(head, tuple(rows), right=frozenset({2, 3}))
