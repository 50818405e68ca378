"""How long a device computes: a roofline, with measured efficiencies where the topology has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from topo_opt.collectives.kriging import Array, Kriging, matern32
from topo_opt.errors import InputError
from topo_opt.topology.schema import Device, Topology

# As in `correction`: standard deviation of the logarithm of measured over modelled time, its noise, lengths in doublings.
DEVIATION, NOISE = 0.5, 0.03
LENGTH = 3.0
ELEMENT_BYTES: Mapping[str, float] = {
    "f64": 8,
    "f32": 4,
    "tf32": 4,
    "bf16": 2,
    "f16": 2,
    "f8": 1,
    "i8": 1,
    "f4": 0.5,
}
Shape = tuple[int, int, int]


class ComputeModel:
    """Roofline times of the devices of a topology.

    A curve that was measured on one device holds for all devices of its model.
    """

    def __init__(self, topology: Topology, calibrated: bool = True) -> None:
        self._devices = {device.id: device for device in topology.devices}
        self._products: dict[tuple[str, str], Kriging] = {}
        self._copies: dict[str, tuple[Kriging, float, float]] = {}
        if not calibrated or topology.measured is None:
            return
        products: dict[tuple[str, str], list[tuple[Shape, float, float]]] = {}
        for gemm in topology.measured.gemms:
            device = self._devices[gemm.device]
            of_type = products.setdefault((device.model, gemm.dtype), [])
            for p in gemm.points:
                shape = (p.m, p.n, p.k)
                of_type.append(
                    (shape, _launched(p.seconds, device), self._product_s(device, gemm.dtype, shape))
                )
        for key, of_type in products.items():
            shapes, measured, modelled = zip(*of_type)
            self._products[key] = _fit(np.array(shapes, dtype=float), measured, modelled)
        copies: dict[str, list[tuple[float, float, float]]] = {}
        for copy in topology.measured.copies:
            if copy.ends[0] == copy.ends[1]:
                device = self._devices[copy.ends[0]]
                rate = device.memory.read_write_bytes_per_s.value
                of_model = copies.setdefault(device.model, [])
                for point in copy.points:
                    # Bytes of a copy count once; it reads and writes them.
                    moved = 2.0 * point.bytes
                    of_model.append((moved, _launched(point.seconds, device), moved / rate))
        for model, of_model in copies.items():
            sizes, measured, modelled = zip(*of_model)
            self._copies[model] = _fit(np.array(sizes)[:, None], measured, modelled), min(sizes), max(sizes)

    def seconds(
        self, flops: float, nbytes: float, dtype: str, device: str, shape: Shape | None = None
    ) -> float:
        """The time of a kernel on `device`, without its launch.

        The longer of computing and moving: operations over the rate of the type (sustained where it is known, else peak),
        bytes over what a copy reaches. Measured curves scale either; `shape` is m, n and k of a matrix product.

        Raises:
            InputError: there is no such device, or a number is negative.
        """
        found = self._devices.get(device)
        if found is None:
            raise InputError(
                f"there is no device '{device}'", hint=f"devices are {', '.join(list(self._devices)[:8])}"
            )
        if flops < 0 or nbytes < 0:
            raise InputError(f"{flops} operations and {nbytes} bytes: neither may be negative")
        computing = flops / found.ops_per_s(dtype)
        moving = nbytes / found.memory.read_write_bytes_per_s.value
        if shape is not None and (product := self._products.get((found.model, dtype))) is not None:
            return max(computing, moving) * float(np.exp(product(np.log2(np.array([shape], dtype=float)))[0]))
        if nbytes and (known := self._copies.get(found.model)) is not None:
            copy, low, high = known
            place = np.log2(np.array([[min(max(nbytes, low), high)]]))
            moving *= float(np.exp(copy(place)[0]))
        return max(computing, moving)

    def _product_s(self, device: Device, dtype: str, shape: Shape) -> float:
        m, n, k = shape
        nbytes = (m * k + k * n + m * n) * ELEMENT_BYTES[dtype]
        return max(
            2.0 * m * n * k / device.ops_per_s(dtype), nbytes / device.memory.read_write_bytes_per_s.value
        )


def _launched(seconds: float, device: Device) -> float:
    """A measured time without the launch that is in it, which most of a very short one is."""
    return max(seconds - device.launch.replayed_ns.value * 1e-9, 0.1 * seconds)


def _fit(places: Array, measured: Sequence[float], modelled: Sequence[float]) -> Kriging:
    return Kriging(_covariance, np.log2(places), np.log(np.array(measured) / np.array(modelled)), NOISE)


def _covariance(a: Array, b: Array) -> Array:
    distance = np.sqrt(((a[:, None, :] - b[None, :, :]) ** 2).sum(axis=2))
    return DEVIATION**2 * matern32(distance / LENGTH)
