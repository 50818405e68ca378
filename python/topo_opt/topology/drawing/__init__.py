"""Machines as pictures: where everything stands, and SVG."""

from topo_opt.topology.drawing.svg import draw

__all__ = ["draw"]
