"""Topologies by name or from a file, with every fault named by its JSON pointer."""

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from topo_opt.errors import InputError
from topo_opt.runtime import strict_json
from topo_opt.topology.check import faults
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

    A word without a slash or a `.json` at its end is a name.

    Raises:
        InputError: no such topology or file, or one with faults; all of them are in the message, each with its JSON pointer.
    """
    text = str(name_or_path)
    if "/" in text or text.endswith(_SUFFIX):
        return parse(_read(Path(text)), text)
    if text not in names():
        hint = f"known are {', '.join(names())}; a file is given as a path that ends in {_SUFFIX}"
        raise InputError(f"there is no topology '{text}'", hint=hint)
    return parse(files("topo_opt.hw_topologies").joinpath(text + _SUFFIX).read_bytes(), text)


def parse(data: bytes, what: str) -> Topology:
    """The topology in JSON text; `what` names it in messages.

    Raises:
        InputError: as `load`.
    """
    if len(data) > MAX_BYTES:
        raise InputError(f"{what} has {len(data)} bytes, a topology at most {MAX_BYTES}")
    try:
        topology = Topology.model_validate_json(_canonical(data, what))
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False, include_input=False)
        raise _refusal(what, [(_pointer(d["loc"]), _words(d)) for d in details]) from None
    if found := list(faults(topology)):
        raise _refusal(what, found)
    return topology


def _canonical(data: bytes, what: str) -> bytes:
    # Two parsers on purpose: the first refuses duplicate keys and NaN, the second takes lists for tuples as JSON means them.
    return strict_json.dumps(strict_json.parse(data, what))


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            return stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None


def _pointer(place: Sequence[int | str]) -> str:
    """RFC 6901."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in place) or "/"


def _words(detail: Any) -> str:
    return _WORDS.get(detail["type"], detail["msg"])


def _refusal(what: str, found: Sequence[tuple[str, str]]) -> InputError:
    shown = [f"{pointer[:200]}: {sentence}" for pointer, sentence in found[:5]]
    more = f"; and {len(found) - 5} more" if len(found) > 5 else ""
    return InputError(f"{what} is not a topology: {'; '.join(shown)}{more}")
