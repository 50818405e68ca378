"""`topo-hw import`: reads a machine from NCCL's topology XML, the text of nvidia-smi topo -m, or XML of hwloc.

The kind of the dump is told by its content. What it leaves open is said on standard error; a dump that lacks a part without
which nothing follows is refused with the reason.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from topo_opt.tools.output import check_destination, write_output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `topo-hw import`."""
    parser.add_argument("source", metavar="SOURCE", help="file with the dump, - for standard input")
    parser.add_argument("-o", "--output", metavar="FILE", help="topology file (default: standard output)")
    parser.add_argument("--device", metavar="MODEL", help="model of the GPUs (topo-hw list --devices)")
    parser.add_argument("--name", metavar="NAME", help="name of the topology (default: that of the file)")


def run(arguments: argparse.Namespace) -> int:
    """Reads and writes; returns the exit code.

    Raises:
        InputError: a file that cannot be read or written, or a dump that is refused.
    """
    from topo_opt.topology.importers import import_dump, import_file
    from topo_opt.topology.loading import MAX_BYTES

    check_destination(arguments.output)
    if arguments.source == "-":
        name = arguments.name or "imported"
        data = sys.stdin.buffer.read(MAX_BYTES + 1)
        imported = import_dump(data, "standard input", device=arguments.device, name=name)
    else:
        imported = import_file(Path(arguments.source), device=arguments.device, name=arguments.name)
    for note in imported.notes:
        print(f"note: {note}", file=sys.stderr)
    write_output(as_text(imported.file).encode(), arguments.output)
    return 0


def as_text(file: dict[str, Any]) -> str:
    """A topology file with one device, node or link a line."""
    parts = []
    for key, value in file.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            lines = ",\n".join(f"    {json.dumps(item)}" for item in value)
            parts.append(f"  {json.dumps(key)}: [\n{lines}\n  ]")
        else:
            parts.append(f"  {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"
