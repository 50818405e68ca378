"""Collects measured tiles into one file, for the package or for compiles on machines without the GPU.

    python -m topo_opt.tuning.ship CACHE|FILE|BUNDLE... --device nvidia-h200-sxm -o hw_topologies/tuning/nvidia-h200-sxm.json

Each kernel keeps its choice alone. Where several sources know a kernel, a full search goes before a short one, then the
faster choice before the slower one: searches whose candidates came from other models add up.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from topo_opt.tools.reporting import add_traceback, reported
from topo_opt.tuning.cache import FILE, read_file, write_file
from topo_opt.tuning.records import DEPTHS, Entry, read_content

COMMAND = "python -m topo_opt.tuning.ship"


def merged(sources: Iterable[Iterable[Entry]], device: str) -> list[Entry]:
    """One entry for every kernel of a device."""
    best: dict[str, Entry] = {}
    for entries in sources:
        for entry in entries:
            if entry.device != device:
                continue
            known = best.get(entry.key.text)
            if known is None or _rank(entry) < _rank(known):
                best[entry.key.text] = entry
    return list(best.values())


def _rank(entry: Entry) -> tuple[int, float]:
    return -DEPTHS.index(entry.depth), entry.timed[0].us


def entries_of(place: Path) -> list[Entry]:
    """The entries of a file, of a bundle, or of a cache folder, where files that are none are named and passed over.

    Raises:
        InputError: a file or a bundle without entries.
    """
    if not place.is_dir() or (place / FILE).exists():
        return read_file(place)
    found = []
    for path in sorted(place.rglob("*.json")):
        try:
            found += read_content(json.loads(path.read_bytes()))
        except (OSError, ValueError) as error:
            print(f"{path} is ignored: {error}", file=sys.stderr)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("sources", nargs="+", type=Path, metavar="CACHE|FILE|BUNDLE")
    parser.add_argument("--device", required=True, help="as in the cache's folders, such as nvidia-h200-sxm")
    parser.add_argument("-o", dest="output", required=True, type=Path)
    add_traceback(parser)
    arguments = parser.parse_args(argv)
    return reported(lambda: _ship(arguments), arguments, COMMAND)


def _ship(arguments: argparse.Namespace) -> int:
    entries = merged([entries_of(place) for place in arguments.sources], arguments.device)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    write_file(arguments.output, entries, brief=True)
    print(f"{arguments.output}: {len(entries)} kernels")
    return 0


if __name__ == "__main__":
    sys.exit(main())
