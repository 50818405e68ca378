"""Splitting a model over the devices of a mesh."""
