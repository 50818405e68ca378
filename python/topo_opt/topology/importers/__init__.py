"""Topologies from dumps of machines: NCCL's XML (NVIDIA and AMD), the text of `nvidia-smi topo -m`, XML of hwloc."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topo_opt.errors import InputError, OptionError
from topo_opt.topology.dump_kind import decoded
from topo_opt.topology.importers.hwloc import read_hwloc
from topo_opt.topology.importers.nccl import read_nccl
from topo_opt.topology.importers.sketch import Sketch, identifier_of, to_file
from topo_opt.topology.importers.smi import read_smi
from topo_opt.topology.importers.xml_input import parse_xml
from topo_opt.topology.loading import MAX_BYTES, parse
from topo_opt.topology.schema import Topology


@dataclass(frozen=True)
class Imported:
    """A machine read from a dump: what kind of dump it was, the topology file, and what the dump left open."""

    kind: str
    file: dict[str, Any]
    topology: Topology
    notes: tuple[str, ...]


def import_file(path: Path, *, device: str | None = None, name: str | None = None) -> Imported:
    """The machine that a dump describes. Its kind is told by its content.

    Args:
        device: the model of the GPUs, by name, where the dump does not say it or the library has no figures for it.
        name: the name of the topology, by default that of the file.

    Raises:
        OptionError: `name` cannot name a topology.
        InputError: no such file, not a dump of these kinds, or one that lacks a part without which nothing follows.
    """
    if name is not None:
        _check_name(name)
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    return import_dump(data, str(path), device=device, name=name or identifier_of(path.stem, "machine"))


def import_dump(data: bytes, what: str, *, device: str | None = None, name: str = "imported") -> Imported:
    """As `import_file`, for the content of a dump; `what` names it in messages."""
    if len(data) > MAX_BYTES:
        raise InputError(f"{what} has more than {MAX_BYTES} bytes, more than any dump of one machine")
    _check_name(name)
    kind, sketch = _read(data, what, device)
    file = to_file(sketch, name, f"read from {kind}")
    verdict = "describes what cannot be"
    if device is not None:
        verdict = f"with --device {device} {verdict}"
    topology = parse(json.dumps(file).encode(), what, verdict=verdict)
    return Imported(kind, file, topology, tuple(sketch.notes))


def _check_name(name: str) -> None:
    if re.fullmatch(r"[A-Za-z][A-Za-z0-9_.-]{0,63}", name) is None:
        raise OptionError(
            f"'{name[:80]}' cannot name a topology",
            hint="a letter, then letters, digits, '_', '.' and '-', 64 at most",
        )


def _is_json(text: bytes) -> bool:
    try:
        return bool(isinstance(json.loads(text), dict | list))
    except ValueError:
        return text.startswith(b"{")


def _read(data: bytes, what: str, device: str | None) -> tuple[str, Sketch]:
    text = data.removeprefix(b"\xef\xbb\xbf").lstrip()
    if _is_json(text):
        raise InputError(f"{what} is JSON, perhaps a topology already", hint="give it to topo-hw show")
    if not text.startswith(b"<"):
        return "nvidia-smi topo -m", read_smi(decoded(data), what, device)
    root = parse_xml(text, what)
    if root.tag == "system":
        return "NCCL topology XML", read_nccl(root, what, device)
    if root.tag == "topology":
        return "hwloc XML", read_hwloc(root, what, device)
    if root.tag == "graphs":
        raise InputError(
            f"{what} has NCCL's rings and trees, not the machine", hint="set NCCL_TOPO_DUMP_FILE for that"
        )
    raise InputError(
        f"{what} is XML with the root <{root.tag[:40]}>",
        hint="expected <system> of NCCL or <topology> of hwloc",
    )
