"""Ops of the `topo` dialect, one a file."""
