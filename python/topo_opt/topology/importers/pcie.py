"""Rates of PCI Express as dumps spell them."""

import re

from topo_opt.topology.library import link_figures

_GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
_SPEED = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*GT/s")
WIDTHS = (16, 8, 4, 2, 1, 32)


def generation_of(speed: str) -> int | None:
    """The generation of a `link_speed` of sysfs ("16.0 GT/s PCIe"), None where it says nothing that is known."""
    match = _SPEED.match(speed)
    return _GENERATIONS.get(float(match.group(1))) if match else None


def lanes_at(bytes_per_s: float) -> tuple[int, int] | None:
    """Generation and width of the link that carries so much: the widest up to 16 lanes, within 2 %; None where none does."""
    for width in WIDTHS:
        for generation in range(1, 7):
            rate = link_figures(f"pcie{generation}").bytes_per_s.value * width
            if abs(rate - bytes_per_s) <= 0.02 * rate:
                return generation, width
    return None


def figures_of(generation: int) -> str:
    """The name of the figures of one lane."""
    return f"pcie{generation}"
