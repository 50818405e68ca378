"""runtime.launch_choice: big tensors are not copied, many small kernels are one graph."""

import pytest

from topo_opt.runtime.launch_choice import choose, direct_us, graph_us
from topo_opt.runtime.plan import Buffer, InputLeaf, KernelStep, OutputLeaf, Variant

BANDWIDTH = 4e6  # bytes a microsecond


def variant_of(kernels, numel, weights=0, mutated=False):
    shape = (numel,)
    buffers = (
        Buffer("input", "float32", shape),
        Buffer("output", "float32", shape),
        Buffer("param", "float32", (weights,), name="w"),
    )
    steps = tuple(KernelStep("k", (0, 1, 2), (1,)) for _ in range(kernels))
    inputs = (InputLeaf("tensor", "x", "float32", shape, 0, mutated=mutated),)
    return Variant("f", {}, inputs, (OutputLeaf("tensor", 1, "float32"),), buffers, steps, 0, 0)


CASES = {
    "one kernel, a GB": (1, 1 << 28, 0, "direct"),
    "one kernel, little": (1, 1 << 10, 0, "direct"),
    "three kernels, little": (3, 1 << 10, 0, "direct"),
    "a layer's kernels, little": (40, 1 << 10, 0, "graph"),
    "many kernels, a GB": (200, 1 << 28, 0, "direct"),
    "decode with large weights": (300, 1 << 12, 1 << 22, "graph"),
}


@pytest.mark.parametrize(("kernels", "numel", "weights", "mode"), CASES.values(), ids=CASES)
def test_the_mode_that_takes_less_time_is_chosen(kernels, numel, weights, mode):
    assert choose(variant_of(kernels, numel, weights), BANDWIDTH) == mode


def test_what_is_written_back_is_copied_twice():
    plain, mutated = variant_of(1, 1 << 28), variant_of(1, 1 << 28, mutated=True)
    added = graph_us(mutated, BANDWIDTH) - graph_us(plain, BANDWIDTH)
    assert added == pytest.approx(2 * (1 << 30) / BANDWIDTH)


def test_launches_are_hidden_behind_work():
    assert direct_us(variant_of(200, 1 << 28), BANDWIDTH) < direct_us(variant_of(200, 1 << 10), BANDWIDTH)
