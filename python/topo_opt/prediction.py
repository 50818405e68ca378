"""The time of a call as the planner's cost model has it: what a compile writes into report.json, and whoever measures reads back.

Free of the compiler, so that `topo-run` can read it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Prediction:
    """One call of a function, in seconds of the device with the most to do. `seconds` is the sum of the four parts.

    Args:
        kernel_seconds: the work of kernels: bytes and operations at the rates that kernels of their kind reach.
        launch_seconds: starts of kernels, one behind the other; `launches` counts them.
        collective_seconds: what moves between devices, starts included; `collectives` counts them.
        call_seconds: from the call to the first kernel.
        devices: how many devices or, on a CPU, processes share the call.
        model: of these devices.
    """

    seconds: float
    kernel_seconds: float
    launch_seconds: float
    launches: int
    collective_seconds: float
    collectives: int
    call_seconds: float
    devices: int
    model: str
