"""codegen.resources: what kernels need on sm_90, compiled without a GPU."""

from dataclasses import replace

import plan_samples as samples
import pytest

from topo_opt.codegen import resources
from topo_opt.codegen.kernel_source import KernelSource, Param
from topo_opt.errors import CompilerCrash, UnsupportedError

BIG = '''"""a product whose tiles don't fit"""

import triton
import triton.language as tl


@triton.jit
def big(a, b, c, B: tl.constexpr):
    i = tl.arange(0, B)
    s = tl.zeros((B, B), tl.float32)
    for k in range(0, 4096, B):
        s = tl.dot(tl.load(a + i[:, None] * 4096 + k + i[None, :]), tl.load(b + k * 4096 + i[:, None] * 4096 + i[None, :]), s)
    tl.store(c + i[:, None] * B + i[None, :], s)
'''


def big(block, stages):
    params = (Param("a", "arg", 0, "bf16"), Param("b", "arg", 1, "bf16"), Param("c", "result", 0, "fp32"))
    return KernelSource("big", BIG, params, (1, 1, 1), 8, stages, {"B": block}, family="gemm")


def test_registers_and_shared_memory_are_measured_once(tmp_path, monkeypatch):
    sources = {"k_sum": samples.CACHE_KERNELS["k_sum"], "same": samples.CACHE_KERNELS["k_sum"]}
    found = resources.measure(sources, cache=tmp_path)
    assert found["k_sum"] == found["same"]
    assert found["k_sum"].registers > 0 and found["k_sum"].shared > 0 and found["k_sum"].target == "sm_90"
    monkeypatch.setattr(
        resources, "_compile", lambda sources, *rest: [] if not sources else pytest.fail("compiled again")
    )
    assert resources.measure(sources, cache=tmp_path) == found


def test_too_much_shared_memory_is_refused(tmp_path):
    with pytest.raises(
        UnsupportedError, match=r"kernel k needs \d+ bytes of shared memory, a block can have 232448"
    ):
        resources.measure({"k": big(128, 5)}, cache=tmp_path)


def test_a_source_that_does_not_compile_is_named(tmp_path):
    broken = replace(
        samples.CACHE_KERNELS["k_add"],
        source=samples.ADD_SOURCE.replace("{name}", "k_add").replace("a + b", "a @ b"),
    )
    with pytest.raises(CompilerCrash, match="kernel k_add does not compile"):
        resources.measure({"k": broken}, cache=tmp_path)


def test_a_damaged_cache_entry_is_measured_again(tmp_path):
    sources = {"k": samples.CACHE_KERNELS["k_add"]}
    found = resources.measure(sources, cache=tmp_path)
    (entry,) = tmp_path.glob("*.json")
    entry.write_text('{"registers": "many"}')
    assert resources.measure(sources, cache=tmp_path) == found


def test_a_compiler_that_dies_names_the_kernel(tmp_path):
    deadly = replace(samples.CACHE_KERNELS["k_add"], source="import os\n\nos._exit(3)\n")
    with pytest.raises(CompilerCrash, match=r"died \(exit 3\) on kernel k_add: no message"):
        resources.measure({"k": deadly}, cache=tmp_path)


def test_the_longest_source_is_compiled_first_and_results_keep_their_order(tmp_path, monkeypatch):
    taken = []

    class Recorder(resources._Worker):
        def compile(self, source, capability):
            taken.append(len(source.source))
            return resources.Resources(f"sm_{capability}", len(source.source), 0, 0)

    monkeypatch.setattr(resources, "_Worker", Recorder)
    base = samples.CACHE_KERNELS["k_add"]
    sources = {f"k{n}": replace(base, source=base.source + "#" * n) for n in (5, 1, 9)}
    found = resources.measure(sources, cache=tmp_path, workers=1)
    assert taken == sorted(taken, reverse=True)
    assert {k: r.registers for k, r in found.items()} == {k: len(s.source) for k, s in sources.items()}
