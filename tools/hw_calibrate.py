"""`topo-hw calibrate`: measures collectives, copies and matrix products on this machine and writes them into a topology.

It starts one process for each device, or runs as one of those that torchrun started:

    topo-hw calibrate --topology h200-x2 --out here.json
    torchrun --nproc-per-node=8 -m topo_opt.tools.hw calibrate --topology hgx-h200-x8 --out here.json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from topo_opt.errors import InputError, OptionError
from topo_opt.runtime import strict_json
from topo_opt.tools.output import check_destination, write_output
from topo_opt.topology import load
from topo_opt.topology.loading import parse, read
from topo_opt.topology.schema import Topology

GPU_SIZES = [1 << k for k in range(13, 30)]
CPU_SIZES = [1 << k for k in range(13, 23)]
GPU_PRODUCTS = [
    [m, n, k] for m in (1, 16, 128, 1024, 8192) for n, k in ((4096, 4096), (14336, 4096), (4096, 14336))
]
CPU_PRODUCTS = [[m, n, k] for m in (1, 64, 256) for n, k in ((256, 256), (512, 512))]
GPU_COPIES = [1 << k for k in range(14, 31, 2)]
CPU_COPIES = [1 << k for k in range(14, 25, 2)]
MAX_SIZE = 1 << 34


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `topo-hw calibrate`."""
    parser.add_argument(
        "--topology", required=True, metavar="NAME|FILE", help="the description that the curves are for"
    )
    parser.add_argument("--out", "-o", metavar="FILE", help="where to write it (default: standard output)")
    parser.add_argument(
        "--sizes", metavar="BYTES,...", help="sizes of collectives; K, M and G are powers of 1024"
    )
    parser.add_argument("--devices", metavar="ID,...", help="rank by rank (default: all that compute)")
    parser.add_argument(
        "--groups", metavar="N,...", help="numbers of devices (default: powers of two, and all)"
    )
    parser.add_argument(
        "--repeats", type=int, default=20, metavar="N", help="of each measurement (default: 20)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measures and writes; returns the exit code.

    Raises:
        InputError: an option or file that cannot be used, or a process that failed.
    """
    from topo_opt.collectives.calibration import calibrate, curves
    from topo_opt.collectives.measure import Plan

    if arguments.repeats < 4:
        raise OptionError(f"--repeats {arguments.repeats}: quartiles need at least 4")
    sizes, groups = _sizes(arguments.sizes), _groups(arguments.groups)
    topology = load(arguments.topology)
    devices = _devices(topology, arguments.devices)
    gpu = topology.device(devices[0]).kind == "gpu"
    plan = Plan(
        devices=len(devices),
        sizes=sizes or (GPU_SIZES if gpu else CPU_SIZES),
        groups=_fitting(groups, len(devices)),
        products=GPU_PRODUCTS if gpu else CPU_PRODUCTS,
        copies=GPU_COPIES if gpu else CPU_COPIES,
        repeats=arguments.repeats,
    )
    _check_machine(topology, devices, gpu)
    check_destination(arguments.out)
    result = calibrate(plan)
    if result is None:
        return 0
    for what in result.left_out:
        print(f"left out: {what}", file=sys.stderr)
    measured = curves(result, topology, devices, plan)
    text = _with(_raw(arguments.topology), json.loads(measured.model_dump_json(exclude_none=True)))
    parse(text.encode(), "the calibrated topology")
    write_output(text.encode(), arguments.out)
    return 0


def _check_machine(topology: Topology, devices: tuple[str, ...], gpu: bool) -> None:
    import torch

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpu and not found:
        raise InputError(
            f"{topology.name} has GPUs, and PyTorch finds none here",
            hint="calibrate runs on the machine that the topology describes",
        )
    if not gpu and found:
        raise InputError(
            f"{topology.name} has no GPUs, this machine has {found}",
            hint="hide them with CUDA_VISIBLE_DEVICES=",
        )
    if gpu and "RANK" not in os.environ and len(devices) > found:
        raise InputError(
            f"{topology.name} has {len(devices)} GPUs, this machine {found}",
            hint="name fewer with --devices, or start one process a GPU on every machine with torchrun",
        )


def _devices(topology: Topology, given: str | None) -> tuple[str, ...]:
    chosen = tuple(given.split(",")) if given else topology.compute
    for device in chosen:
        if device not in topology.compute:
            raise InputError(
                f"--devices: {topology.name} does not compute on '{device}'",
                hint=f"but on {', '.join(topology.compute[:8])}",
            )
    if len(set(chosen)) != len(chosen):
        raise OptionError(f"--devices {given}: a device is named twice")
    return chosen


def _groups(given: str | None) -> list[int]:
    if given is None:
        return []
    try:
        groups = sorted({int(part) for part in given.split(",")})
    except ValueError:
        groups = []
    if not groups or groups[0] < 2:
        raise OptionError(f"--groups {given}: numbers from 2 on, with commas between them")
    return groups


def _fitting(groups: list[int], count: int) -> list[int]:
    """These numbers of devices where some were given; else the powers of two up to `count`, and `count`."""
    if not groups:
        powers = {1 << k for k in range(1, count.bit_length())}
        return sorted(powers | ({count} if count > 1 else set()))
    if groups[-1] > count:
        raise InputError(
            f"--groups {groups[-1]}: {count} devices are measured", hint=f"give numbers from 2 to {count}"
        )
    return groups


def _sizes(given: str | None) -> list[int]:
    if given is None:
        return []
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    try:
        sizes = sorted({int(part.rstrip("KMG")) * units.get(part[-1:], 1) for part in given.split(",")})
    except ValueError:
        sizes = []
    if not sizes or sizes[0] < 64 or sizes[-1] > MAX_SIZE:
        raise OptionError(
            f"--sizes {given}: bytes from 64 to 16G, with commas between them, such as 8K,2M,512M"
        )
    return sizes


def _raw(name_or_path: str) -> dict[str, Any]:
    """The file as it is written, so that its short forms stay."""
    raw: dict[str, Any] = strict_json.parse(read(name_or_path), name_or_path)
    return raw


def _with(raw: dict[str, Any], measured: dict[str, Any]) -> str:
    """The file with these measurements in the place of its own; a line for every point."""
    lines: list[str] = []
    for key, value in {**raw, "measured": measured}.items():
        text = json.dumps(value, indent=2 if key != "measured" else None).replace("\n", "\n  ")
        if key == "measured":
            text = text.replace('{"bytes"', '\n    {"bytes"').replace('{"seconds"', '\n    {"seconds"')
        lines.append(f"  {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"
