"""Runs the measurement of a machine, with processes of its own or as one that torchrun started, and makes curves of it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from topo_opt.collectives import measure
from topo_opt.collectives.measure import Plan, Result
from topo_opt.errors import InputError
from topo_opt.topology.measured import (
    BytesTiming,
    CollectiveCurve,
    CopyCurve,
    GemmCurve,
    GemmTiming,
    Measurements,
)
from topo_opt.topology.schema import Topology

GRACE_S = 5
"""How long the other processes get to end by themselves when one has failed."""


def under_torchrun() -> bool:
    """Whether torchrun, or something that sets the same variables, started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def calibrate(plan: Plan) -> Result | None:
    """Measures; None on the ranks under torchrun that have nothing to tell.

    Raises:
        InputError: a process failed or was missing, with what it said.
    """
    with tempfile.TemporaryDirectory(prefix="topo-hw-") as folder:
        plan_file, result_file = Path(folder, "plan.json"), Path(folder, "result.json")
        plan_file.write_text(json.dumps(asdict(plan)))
        if under_torchrun():
            world = int(os.environ["WORLD_SIZE"])
            if world != plan.devices:
                raise InputError(
                    f"torchrun started {world} processes, the topology has {plan.devices} devices that compute",
                    hint=f"use --nproc-per-node={plan.devices}, or --devices",
                )
            code = measure.main([str(plan_file), str(result_file)])
            if code:
                raise InputError(f"the measurement failed on rank {os.environ['RANK']}")
        else:
            _run(plan, plan_file, result_file)
        return Result(**json.loads(result_file.read_text())) if result_file.exists() else None


def _run(plan: Plan, plan_file: Path, result_file: Path) -> None:
    command = [sys.executable, "-m", "topo_opt.collectives.measure", str(plan_file), str(result_file)]
    shared = {
        **os.environ,
        "WORLD_SIZE": str(plan.devices),
        "LOCAL_WORLD_SIZE": str(plan.devices),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }
    processes: list[subprocess.Popen[bytes]] = []
    logs = [Path(plan_file.parent, f"rank{rank}.txt") for rank in range(plan.devices)]
    try:
        for rank, log in enumerate(logs):
            environment = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            with log.open("wb") as stream:
                processes.append(subprocess.Popen(command, env=environment, stdout=stream, stderr=stream))
        failed = _first_failure(processes)
    finally:
        _end(processes)
    if failed is not None:
        code = processes[failed].returncode
        raise InputError(f"rank {failed} ended with {code}: {_last_words(logs[failed])}")


def _first_failure(processes: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Waits until all have ended well or one has not."""
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code:
                return rank
        if all(code == 0 for code in codes):
            return None
        time.sleep(0.1)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + GRACE_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error:")]
    return (errors or lines or ["it said nothing"])[-1].removeprefix("error: ")[:500]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def curves(result: Result, topology: Topology, devices: Sequence[str], plan: Plan) -> Measurements:
    """Curves with ids of devices and sources."""
    today = date.today().isoformat()
    gpu = result.accelerator != "cpu"
    software = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    how = f"{len(devices)} x {topology.device(devices[0]).model}, {software}; median of {plan.repeats}"
    how += ", calls in a CUDA graph" if gpu else ", calls one behind the other"
    source = f"measured {today}: {how}"
    together = source + ("; NVLink multicast off; slowest rank" if gpu else " over gloo; slowest rank")
    collectives: dict[tuple[str, str, int], list[BytesTiming]] = {}
    for row in result.collectives:
        key = (row["kind"], row["algorithm"], row["size"])
        collectives.setdefault(key, []).append(BytesTiming(bytes=row["bytes"], **_timing(row["times"])))
    copies: dict[int, list[BytesTiming]] = {}
    for row in result.copies:
        copies.setdefault(row["peer"], []).append(BytesTiming(bytes=row["bytes"], **_timing(row["times"])))
    products = tuple(
        GemmTiming(m=row["m"], n=row["n"], k=row["k"], **_timing(row["times"])) for row in result.products
    )
    return Measurements(
        date=today,
        versions=dict(result.versions),
        collectives=tuple(
            CollectiveCurve(
                kind=kind,  # type: ignore[arg-type]
                algorithm=algorithm,  # type: ignore[arg-type]
                participants=tuple(devices[:size]),
                points=tuple(points),
                source=together,
            )
            for (kind, algorithm, size), points in collectives.items()
        ),
        gemms=(GemmCurve(device=devices[0], dtype=result.dtype, points=products, source=source),)  # type: ignore[arg-type]
        if products
        else (),
        copies=tuple(
            CopyCurve(ends=(devices[0], devices[peer]), points=tuple(points), source=source)
            for peer, points in copies.items()
        ),
    )


def _timing(times: list[float]) -> dict[str, Any]:
    quartiles = (median(times), times[len(times) // 4], times[(3 * len(times)) // 4])
    return dict(zip(("seconds", "low_s", "high_s"), (float(f"{value:.5g}") for value in quartiles)))
