"""Figures that machines share, by name: device models (`hw_topologies/devices`) and links (`hw_topologies/links`)."""

from functools import cache
from importlib.resources import files
from typing import TypeVar

from pydantic import Field, ValidationError

from topo_opt.errors import InputError
from topo_opt.runtime import strict_json
from topo_opt.topology.device import DeviceFigures
from topo_opt.topology.figures import Latency, Rate, Strict
from topo_opt.topology.schema import LinkKind

_SUFFIX = ".json"
Model = TypeVar("Model", bound=Strict)


class LinkFigures(Strict):
    """One lane of a kind of link, or the whole link where it has no lanes; rates are those of one direction."""

    kind: LinkKind
    bytes_per_s: Rate
    sustained_bytes_per_s: Rate | None = None
    latency_ns: Latency | None = Field(default=None, description="of one crossing; does not depend on lanes")


def device_models() -> list[str]:
    """Names of the device models, sorted."""
    return _names("devices")


def link_kinds() -> list[str]:
    """Names of the links, sorted."""
    return _names("links")


@cache
def device_figures(name: str) -> DeviceFigures:
    """The figures of a device model.

    Raises:
        InputError: there is none of that name.
    """
    return _read("devices", name, DeviceFigures, "device model")


@cache
def link_figures(name: str) -> LinkFigures:
    """The figures of one lane of a link.

    Raises:
        InputError: there is none of that name.
    """
    return _read("links", name, LinkFigures, "kind of link")


def _names(folder: str) -> list[str]:
    place = files("topo_opt.hw_topologies").joinpath(folder)
    return sorted(f.name.removesuffix(_SUFFIX) for f in place.iterdir() if f.name.endswith(_SUFFIX))


def _read(folder: str, name: str, model: type[Model], what: str) -> Model:
    if name not in _names(folder):
        raise InputError(f"there is no {what} '{name}'", hint=f"known are {', '.join(_names(folder))}")
    data = files("topo_opt.hw_topologies").joinpath(folder, name + _SUFFIX).read_bytes()
    try:
        return model.model_validate_json(strict_json.dumps(strict_json.parse(data, name)))
    except ValidationError as error:
        raise InputError(f"hw_topologies/{folder}/{name}{_SUFFIX}: {error}") from None
