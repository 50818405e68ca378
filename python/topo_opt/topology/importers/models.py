"""Which model of the package's library a GPU of a dump is."""

import re
from dataclasses import dataclass, replace
from functools import cache

from topo_opt.errors import InputError
from topo_opt.topology.library import device_figures, device_models

_VENDOR = re.compile(r"\b(nvidia|tesla|amd|radeon|advanced micro devices|inc\.?)\b", re.IGNORECASE)


@dataclass(frozen=True)
class Hints:
    """What a dump says of a GPU's model: any of these may be missing. `model` is a name that the user gave."""

    name: str | None = None
    pci: str | None = None
    capability: int | None = None
    architecture: str | None = None
    cores: int | None = None
    model: str | None = None


def with_model(hints: Hints, model: str | None) -> Hints:
    """The hints with a model that the user names: by the name of its file or a part of it that no other has, or as the driver
    calls it.

    Raises:
        InputError: the library has no such model, or several.
    """
    if model is None:
        return hints
    if model in device_models():
        return replace(hints, model=model)
    if found := _by_name().get(_plain(model)):
        return replace(hints, model=found)
    # A maker's name alone is no part of a model's name, but it is of the files'.
    wanted, known = (_plain(model), _plain) if _plain(model) else (model.lower().strip(), str.lower)
    fitting = [name for name in device_models() if wanted and wanted in known(name)]
    if len(fitting) == 1:
        return replace(hints, model=fitting[0])
    if fitting:
        raise InputError(f"'{model[:80]}' could be {', '.join(fitting)}", hint="name one of them")
    raise InputError(
        f"there is no device model '{model[:80]}'", hint=f"known are {', '.join(device_models())}"
    )


def recognise(hints: Hints) -> str | None:
    """The name of the model in the library; None when nothing, or more than one model, fits."""
    if hints.model is not None:
        return hints.model
    if hints.pci is not None and (model := _by_pci().get(hints.pci)):
        return model
    if hints.name is not None and (model := _by_name().get(_plain(hints.name))):
        return model
    fitting = [model for model in device_models() if _fits(model, hints)]
    return fitting[0] if len(fitting) == 1 else None


def contradiction(hints: Hints) -> str | None:
    """The model that a dump names where the user named another one."""
    said = recognise(replace(hints, model=None))
    return said if hints.model is not None and said not in (None, hints.model) else None


def _fits(model: str, hints: Hints) -> bool:
    figures = device_figures(model)
    if hints.pci is not None or hints.name is not None:
        return False  # it said what it is, and the library does not have it
    if hints.architecture is not None:
        return hints.architecture == figures.target.architecture and hints.cores == figures.cores.count.value
    return hints.capability is not None and hints.capability == figures.target.capability


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", _VENDOR.sub("", name).lower())


@cache
def _by_pci() -> dict[str, str]:
    out = {}
    for model in device_models():
        known = device_figures(model).recognised_by
        out.update(dict.fromkeys(known.pci if known else (), model))
    return out


@cache
def _by_name() -> dict[str, str]:
    out = {}
    for model in device_models():
        known = device_figures(model).recognised_by
        out.update({_plain(name): model for name in (known.names if known else ())})
    return out
