"""`topo-hw schema`: prints the JSON Schema of topology files."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """There are none."""


def run(arguments: argparse.Namespace) -> int:
    """Prints it; returns the exit code."""
    from topo_opt import topology

    print(topology.json_schema())
    return 0
