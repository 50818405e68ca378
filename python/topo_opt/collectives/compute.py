"""How long a device computes: a roofline, the reach of generated kernels, and measured curves where the topology has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from topo_opt.collectives.kernels import KernelKind, kernels
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
                of_library = kernels().reach("product", p.m).of_library
                seconds = _launched(p.seconds, device) * (of_library.value if of_library else 1.0)
                of_type.append((shape, seconds, self._product_s(device, gemm.dtype, shape)))
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
        self,
        flops: float,
        nbytes: float,
        dtype: str,
        device: str,
        shape: Shape | None = None,
        kind: KernelKind | None = None,
    ) -> float:
        """The time of a kernel on `device`, without its launch.

        The longer of computing and moving: operations over the rate of the type (sustained where it is known, else peak),
        bytes over what a copy reaches; with `kind` as generated kernels of that kind reach them (`kernels.py`).

        Args:
            shape: m, n and k of a matrix product, which measured curves scale; rows, columns and groups of a grouped one; rows come
                first for other kinds too.
            kind: of the kernel; None for the bare roofline, or a product where there is a shape.

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
        if shape is not None and kind in (None, "product"):
            return self._of_product(found, flops, nbytes, dtype, shape)
        moved = nbytes
        if nbytes and (known := self._copies.get(found.model)) is not None:
            copy, low, high = known
            place = np.log2(np.array([[min(max(nbytes, low), high)]]))
            moved *= float(np.exp(copy(place)[0]))
        return _reached(found, flops, moved, dtype, kind, shape)

    def start(self, kind: KernelKind, rows: int) -> float:
        """The part of `seconds` that kernels side by side in one launch share."""
        return kernels().reach(kind, rows).start_ns.value * 1e-9

    def _of_product(self, device: Device, flops: float, nbytes: float, dtype: str, shape: Shape) -> float:
        seconds = _reached(device, flops, nbytes, dtype, "product", shape)
        product = self._products.get((device.model, dtype))
        if product is None:
            return seconds
        return seconds * float(np.exp(product(np.log2(np.array([shape], dtype=float)))[0]))

    def _product_s(self, device: Device, dtype: str, shape: Shape) -> float:
        m, n, k = shape
        nbytes = (m * k + k * n + m * n) * ELEMENT_BYTES[dtype]
        return _reached(device, 2.0 * m * n * k, nbytes, dtype, "product", shape)


def _reached(
    device: Device, flops: float, nbytes: float, dtype: str, kind: KernelKind | None, shape: Shape | None
) -> float:
    """Seconds by what kernels of a kind reach; by the device's figures alone without one."""
    computing = flops / device.ops_per_s(dtype)
    moving = nbytes / device.memory.read_write_bytes_per_s.value
    if kind is None:
        return max(computing, moving)
    rows, columns, inner = shape or (1, 1, 1)
    reach = kernels().reach(kind, rows)
    if kind == "product":
        computing *= reach.spread(rows, columns, device.cores.count.value)
    elif kind == "grouped_product":
        computing *= reach.ragged(rows, inner)
    longer = max(computing / reach.ops_share.value, moving / reach.bytes_share.value)
    return longer + reach.start_ns.value * 1e-9 if longer else 0.0


def _launched(seconds: float, device: Device) -> float:
    """A measured time without the launch that is in it, which most of a very short one is."""
    return max(seconds - device.launch.replayed_ns.value * 1e-9, 0.1 * seconds)


def _fit(places: Array, measured: Sequence[float], modelled: Sequence[float]) -> Kriging:
    return Kriging(_covariance, np.log2(places), np.log(np.array(measured) / np.array(modelled)), NOISE)


def _covariance(a: Array, b: Array) -> Array:
    distance = np.sqrt(((a[:, None, :] - b[None, :, :]) ** 2).sum(axis=2))
    return DEVIATION**2 * matern32(distance / LENGTH)
