"""The cost model against measured collectives, and what curves do to it."""

import json

import numpy as np
import pytest
from collective_machines import SOURCE, group, switch

from topo_opt import topology
from topo_opt.collectives import CollectiveModel
from topo_opt.topology import Topology

PAIR = (("gpu0", "gpu1"),)


def without(machine: Topology, drop) -> Topology:
    """The machine without the points for which `drop(curve, point)` is true."""
    curves = [
        curve.model_copy(update={"points": kept})
        for curve in machine.measured.collectives
        if (kept := tuple(p for p in curve.points if not drop(curve, p)))
    ]
    measured = machine.measured.model_copy(update={"collectives": tuple(curves)})
    return machine.model_copy(update={"measured": measured})


def errors(machine: Topology, model_of) -> np.ndarray:
    """Relative errors at every measured point of the library; `model_of(curve, point)` gives the model."""
    return np.array(
        [
            model_of(curve, point).cost(curve.kind, point.bytes, PAIR).seconds / point.seconds - 1
            for curve in machine.measured.collectives
            if curve.algorithm == "library"
            for point in curve.points
        ]
    )


@pytest.fixture(scope="module")
def h200():
    return topology.load("h200-x2")


def test_uncalibrated(h200):
    model = CollectiveModel(h200, calibrated=False)
    found = abs(errors(h200, lambda *_: model))
    assert len(found) == 27 and found.max() < 0.35


def test_uncalibrated_from_datasheet_figures_only():
    """The same two GPUs in a topology that has nothing measured, neither curves nor sustained rates nor latencies."""
    plain = switch(2, rate=450e9, alpha=None)
    model = CollectiveModel(plain)
    machine = topology.load("h200-x2")
    assert abs(errors(machine, lambda *_: model)).max() < 0.35


def test_calibrated(h200):
    model = CollectiveModel(h200)
    found = abs(errors(h200, lambda *_: model))
    assert np.median(found) < 0.03 and found.max() < 0.1


def test_points_that_were_left_out(h200):
    def left_out(curve, point):
        return CollectiveModel(without(h200, lambda c, p: c.kind == curve.kind and p is point))

    found = abs(errors(h200, left_out))
    assert np.median(found) <= 0.1 and found.max() <= 0.2


def test_sizes_that_were_left_out(h200):
    """All points of a size at once: what is between measured sizes has to be right too."""

    def left_out(curve, point):
        row = curve.points.index(point)
        return CollectiveModel(without(h200, lambda c, p: c.points.index(p) == row))

    found = abs(errors(h200, left_out))
    assert np.median(found) <= 0.1 and found.max() <= 0.2


def test_times_never_fall_with_the_size(h200):
    model = CollectiveModel(h200)
    sizes = np.geomspace(1, 4e9, 1500)
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"):
        times = [model.cost(kind, float(size), PAIR).seconds for size in sizes]
        assert (np.diff(times) >= -1e-12 * np.array(times[1:])).all(), kind


def test_curves_of_another_machine_and_another_number_of_devices(h200):
    eight = topology.load("hgx-h200-x8")
    plain, told = CollectiveModel(eight), CollectiveModel(eight, calibration=h200)
    pair = told.cost("all_reduce", 8388608, PAIR).seconds
    assert pair == pytest.approx(50.0e-6, rel=0.1)
    groups = (tuple(eight.compute),)
    for nbytes in (2**15, 2**21, 2**25, 2**29):
        before, after = (m.cost("all_gather", nbytes, groups).seconds for m in (plain, told))
        assert 0.7 < after / before < 1.4
        assert after != before


def test_symmetric_memory(h200):
    model = CollectiveModel(h200, symmetric_memory=True)
    assert model.cost("all_reduce", 2097152, PAIR).algorithm.startswith("two-shot")
    assert model.cost("all_reduce", 2097152, PAIR).seconds == pytest.approx(14.7e-6, rel=0.1)
    assert model.cost("all_reduce", 2097152, PAIR, "one-shot").seconds == pytest.approx(21.2e-6, rel=0.1)
    assert CollectiveModel(h200).cost("all_reduce", 2097152, PAIR).seconds == pytest.approx(32e-6, rel=0.1)


def curve(points, kind="all_reduce"):
    return {
        "kind": kind,
        "algorithm": "library",
        "participants": ["gpu0", "gpu1"],
        "source": SOURCE,
        "points": [{"bytes": b, "seconds": s} for b, s in points],
    }


def test_noise_that_makes_more_bytes_faster_is_levelled(h200):
    raw = json.loads(h200.model_dump_json())
    raw["measured"]["collectives"] = [curve([(8192, 30e-6), (16384, 20e-6), (32768, 22e-6)])]
    model = CollectiveModel(Topology.model_validate_json(json.dumps(raw)))
    times = [model.cost("all_reduce", float(b), PAIR).seconds for b in (8192, 11000, 16384, 20000, 32768)]
    assert (np.diff(times) >= -1e-12 * max(times)).all()


def test_small_messages_of_eight_gpus_from_constants():
    """Eight Hopper GPUs, NCCL: 18 to 20 us up to 512 KiB, 41 us for 2 MiB, 81 us for 8 MiB (kvcache-ai/Mooncake pull request 3484)."""
    model = CollectiveModel(topology.load("hgx-h100-x8"))
    groups = (tuple(model.topology.compute),)
    for nbytes, micros in ((131072, 19.2), (524288, 20.4), (2097152, 40.7), (8388608, 81.2)):
        assert model.cost("all_reduce", nbytes, groups).seconds * 1e6 == pytest.approx(micros, rel=0.3)


def test_compute():
    model = CollectiveModel(switch(2))
    device = model.topology.devices[0]
    assert model.compute(1e12, 1, "bf16", "gpu0") == pytest.approx(1e12 / device.ops_per_s("bf16"))
    rate = device.memory.read_write_bytes_per_s.value
    assert model.compute(1, 1e9, "bf16", "gpu0") == pytest.approx(1e9 / rate)


def test_measured_products_and_copies(h200):
    raw = json.loads(h200.model_dump_json())
    peak = h200.devices[0].ops_per_s("bf16")
    shapes = [(64, 4096, 4096), (512, 4096, 4096), (4096, 4096, 4096), (8192, 8192, 8192)]
    halves = [
        {
            "m": m,
            "n": n,
            "k": k,
            "seconds": 2 * max(2 * m * n * k / peak, 2 * (m * k + k * n + m * n) / 4.24e12),
        }
        for m, n, k in shapes
    ]
    raw["measured"]["gemms"] = [{"device": "gpu0", "dtype": "bf16", "source": SOURCE, "points": halves}]
    raw["measured"]["copies"] = [
        {
            "ends": ["gpu0", "gpu0"],
            "source": SOURCE,
            "points": [{"bytes": 1 << 26, "seconds": 3 * (2 << 26) / 4.24e12}],
        }
    ]
    model = CollectiveModel(Topology.model_validate_json(json.dumps(raw)))
    shape = (2048, 4096, 4096)
    flops = 2.0 * shape[0] * shape[1] * shape[2]
    assert model.compute(flops, 0, "bf16", "gpu1", shape) == pytest.approx(2 * flops / peak, rel=0.1)
    assert model.compute(0, 2 << 26, "bf16", "gpu1") == pytest.approx(3 * (2 << 26) / 4.24e12, rel=0.1)
    plain = CollectiveModel(h200, calibrated=False)
    # 512 tiles of 128 x 128 on 132 cores are four waves, the last one nearly full; a kernel takes 2 us to get going.
    waves = 4 * 132 / 512
    assert plain.compute(flops, 0, "bf16", "gpu1", shape) == pytest.approx(waves * flops / peak + 2e-6)


def test_eight_devices_are_fast(h200):
    import time

    eight = topology.load("hgx-h100-x8")
    groups = group(8)
    CollectiveModel(eight).cost("all_reduce", 1e6, groups)  # what Python loads once
    model = CollectiveModel(eight)
    start = time.process_time()
    model.cost("all_reduce", 1e6, groups)
    assert time.process_time() - start < 0.04
    start = time.process_time()
    for _ in range(1000):
        model.cost("all_reduce", 1e6, groups)
    assert time.process_time() - start < 0.05


def test_large_all_reduces_of_hopper_boxes():
    """Rings reach 365 to 370 GB/s of bus rate among 8 H100, NVLS 247, 258, 265, 270 and 273 GB/s of 2 GB among 4 to 8
    (NVIDIA/nccl issue 1455)."""
    model = CollectiveModel(topology.load("hgx-h100-x8"))
    nbytes = 2 << 30
    for count, rate in ((4, 247), (5, 258), (6, 265), (7, 270), (8, 273)):
        cost = model.cost("all_reduce", nbytes, group(count))
        assert cost.algorithm == "in-switch" and nbytes / cost.seconds / 1e9 == pytest.approx(rate, rel=0.05)
    ring = model.cost("all_reduce", nbytes, group(8), "ring").seconds
    assert 1.75 * nbytes / ring / 1e9 == pytest.approx(367, rel=0.05)
    # What the switch does not reduce: with multicast off, other kinds of machines, groups on several switches.
    off = CollectiveModel(topology.load("hgx-h100-x8"), multicast=False)
    assert off.cost("all_reduce", nbytes, group(8)).algorithm == "ring, Simple"
    for name in ("dgx-a100-x8", "mi300x-x8"):
        other = CollectiveModel(topology.load(name))
        assert "in-switch" not in other.cost("all_reduce", nbytes, (other.topology.compute,)).algorithm
