"""Topologies by name or from a file, with every fault named by its JSON pointer."""

import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from topo_opt.errors import InputError
from topo_opt.runtime import strict_json
from topo_opt.topology.check import faults
from topo_opt.topology.cluster import build_cluster
from topo_opt.topology.dump_kind import dump_kind, import_line
from topo_opt.topology.expand import Misfit, expand
from topo_opt.topology.file import BY_NAME, INLINE, TopologyFile
from topo_opt.topology.schema import Topology

MAX_BYTES = 4 << 20
_SUFFIX = ".json"
# What pydantic says, where its words would not tell a reader what to do.
_WORDS = {
    "extra_forbidden": "is not a key of the schema",
    "missing": "is missing",
    "finite_number": "is not a finite number",
}


def names() -> list[str]:
    """The topologies that come with the package, sorted."""
    folder = files("topo_opt.hw_topologies")
    return sorted(f.name.removesuffix(_SUFFIX) for f in folder.iterdir() if f.name.endswith(_SUFFIX))


def load(name_or_path: str | Path) -> Topology:
    """The topology of that name among those of the package, or the one in the file.

    Raises:
        InputError: as `read`, or a topology with faults; all of them are in the message, each with its JSON pointer.
    """
    return parse(read(name_or_path), str(name_or_path))


def read(name_or_path: str | Path) -> bytes:
    """The text of a topology. A word that is no name of the package, or has a slash or a `.json` at its end, is a path.

    Raises:
        InputError: no such topology or file, or a file that is a dump of a machine.
    """
    text = str(name_or_path)
    if "/" not in text and not text.endswith(_SUFFIX):
        if text in names():
            return _read_shipped(text)
        if not Path(text).is_file():
            raise InputError(
                f"there is no topology '{text}'",
                hint=f"known are {', '.join(names())}; or give the path of a file",
            )
    data = _read_file(Path(text))
    if (kind := dump_kind(data)) is not None:
        raise InputError(f"{text} is a dump ({kind}), not a topology", hint=import_line(text))
    return data


def parse(data: bytes, what: str, *, verdict: str = "is not a topology") -> Topology:
    """The topology in JSON text; `what` names it in messages, `verdict` says what faults mean for it.

    Raises:
        InputError: as `load`.
    """
    if len(data) > MAX_BYTES:
        raise InputError(f"{what} has {len(data)} bytes, a topology at most {MAX_BYTES}")
    try:
        file = TopologyFile.model_validate_json(_canonical(data, what))
        cluster = file.cluster
        if cluster is not None and cluster.node is not None:
            machine = _machine_of_cluster(cluster.node)
        else:
            machine, origins = expand(file)
            if found := list(faults(machine)):
                raise _refusal(
                    f"{what} {verdict}", [(origins.pointer(pointer), sentence) for pointer, sentence in found]
                )
        if cluster is None:
            return machine
        return build_cluster(cluster, machine, file.name, file.description)
    except Misfit as misfit:
        raise _refusal(f"{what} {verdict}", [(misfit.pointer, misfit.sentence)]) from None
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False)
        raise _refusal(f"{what} {verdict}", [(_pointer(d["loc"]), _words(d)) for d in details]) from None


def json_schema() -> str:
    """The JSON Schema of a topology file, as text."""
    return json.dumps(TopologyFile.model_json_schema(), indent=2)


def _machine_of_cluster(node: str) -> Topology:
    # A name and nothing else: a file from elsewhere must not make us open files. Names are those of whole machines,
    # since a cluster in a cluster could grow without bound.
    if node not in names():
        raise Misfit("/cluster/node", f"there is no topology '{node}'; known are {', '.join(names())}")
    data = _read_shipped(node)
    if "cluster" in strict_json.parse(data, node):
        raise Misfit("/cluster/node", f"'{node}' is a cluster itself")
    return parse(data, node)


def _canonical(data: bytes, what: str) -> bytes:
    # Two parsers on purpose: the first refuses duplicate keys and NaN, the second takes lists for tuples as JSON means them.
    return json.dumps(strict_json.parse(data, what), allow_nan=False).encode()


def _read_shipped(name: str) -> bytes:
    return files("topo_opt.hw_topologies").joinpath(name + _SUFFIX).read_bytes()


def _read_file(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            return stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None


def _pointer(place: Sequence[int | str]) -> str:
    """RFC 6901."""
    parts = (str(part) for part in place if part not in (BY_NAME, INLINE))
    return "".join("/" + part.replace("~", "~0").replace("/", "~1") for part in parts) or "/"


def _words(detail: Any) -> str:
    given = detail.get("input")
    shown = f", not {given!r:.60}" if isinstance(given, str | int | float | bool | None) else ""
    said = str(detail["msg"]).removeprefix("Value error, ")
    return _WORDS.get(detail["type"]) or said + (shown if detail["type"] != "value_error" else "")


def _refusal(head: str, found: Sequence[tuple[str, str]]) -> InputError:
    shown = [f"{pointer[:200]}: {sentence}" for pointer, sentence in found[:5]]
    more = f"; and {len(found) - 5} more" if len(found) > 5 else ""
    return InputError(f"{head}: {'; '.join(shown)}{more}")
