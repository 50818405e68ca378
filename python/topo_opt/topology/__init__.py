"""Machine descriptions: their schema, and loading them by name or from a file. `graph` has the graph of their links."""

from topo_opt.topology.loading import json_schema, load, names, parse
from topo_opt.topology.schema import Device, Topology

__all__ = ["Device", "Topology", "json_schema", "load", "names", "parse"]
