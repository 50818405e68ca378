"""What passes the checks of a measurement, and what does not."""

from __future__ import annotations

import re
import time
from dataclasses import asdict, replace

import pytest
import torch
from torch_mlir import ir
from tuning_samples import Interpreted, device, kernel_module, only_kernel, sum_of_squares

from topo_opt.codegen.triton import lower_kernel
from topo_opt.codegen.triton.kernel import Kernel
from topo_opt.runtime.plan import MAX_SHARED_BYTES
from topo_opt.tuning import gate, search_space
from topo_opt.tuning.arguments import signature_of
from topo_opt.tuning.arguments_data import Argument, Result, Signature
from topo_opt.tuning.bench import Bench, _fill
from topo_opt.tuning.gpu import difference, find_gpu
from topo_opt.tuning.gpu_worker import Server
from topo_opt.tuning.measure import Case, GpuMeasurer, Job
from topo_opt.tuning.workers import LineProcess, Pool, WorkerDied


@pytest.fixture(scope="module")
def sample():
    """Signature and source of a kernel, and the module that must outlive them."""
    module = sum_of_squares()
    with module.context, ir.Location.unknown():
        function = only_kernel(module)
        return signature_of(function), lower_kernel(function), module


def changed(source, old: str, new: str) -> dict:
    assert old in source.source
    return asdict(replace(source, source=source.source.replace(old, new)))


def test_a_right_candidate_is_timed(sample):
    signature, source, module = sample
    bench = Bench(signature, Interpreted(lambda s: 10.0 * s["num_warps"]))
    assert bench.set_reference(asdict(source)) == ""
    with module.context, ir.Location.unknown():
        kernel = Kernel(only_kernel(module))
        other = search_space.lower(kernel, dict(kernel.attributes["tile"], x=1, r=64, warps=2))
    assert "for r0 in" in other.source
    outcome = bench.measure(asdict(other))
    assert outcome.ok and outcome.us == 20.0


def test_a_wrong_candidate_is_rejected(sample):
    signature, source, _ = sample
    bench = Bench(signature, Interpreted())
    bench.set_reference(asdict(source))
    (square,) = re.findall(r"\w+ = (\w+) \* \1\n", source.source)
    outcome = bench.measure(changed(source, f"{square} * {square}", f"{square} + {square}"))
    assert "result 0 is wrong" in outcome.reason


def test_a_racy_candidate_is_rejected(sample):
    signature, source, _ = sample

    class Racy(Interpreted):
        """Another result at every launch, in the last bit of one element."""

        def prepare(self, source, tensors):
            launch, count = super().prepare(source, tensors), [0]

            def racy() -> None:
                launch()
                count[0] += 1
                tensors[-1].view(torch.int32)[0] += count[0]

            racy.us = 1.0
            return racy

    bench = Bench(signature, Interpreted())
    bench.set_reference(asdict(source))
    bench.backend = Racy()
    assert "a race" in bench.measure(asdict(source)).reason


def test_a_candidate_that_spoils_its_scratch_is_rejected(sample):
    signature, source, _ = sample
    body = source.source.replace("(in0, out0,", "(in0, out0, counter,")
    body += "    tl.atomic_add(counter, 1)\n    tl.store(out0, tl.load(out0) + (tl.load(counter) > 8 * tl.num_programs(0)))\n"
    spoilt = asdict(source) | {
        "source": body,
        "params": [*asdict(source)["params"], {"name": "counter", "kind": "scratch", "index": 0, "dtype": "i32", "descriptor": None}],
        "scratch": [{"dtype": "i32", "numel": 1, "zeroed": True}],
    }  # fmt: skip

    class Many(Interpreted):
        def time_us(self, launches, *, careful, give_up_us):
            for _ in range(10):
                launches[0]()
            return 1.0, True

    bench = Bench(signature, Many())
    bench.set_reference(asdict(source))
    assert "after many launches" in bench.measure(spoilt).reason


def test_a_candidate_that_does_not_compile_is_rejected(sample):
    signature, source, _ = sample
    bench = Bench(signature, Interpreted())
    bench.set_reference(asdict(source))
    assert "does not compile" in bench.measure(changed(source, "import triton\n", "import tritonn\n")).reason


def test_rewritten_arguments_are_put_back_before_every_run():
    """Two launches that add into their argument must see the same start."""
    pristine = torch.zeros(4)
    signature = Signature((Argument((4,), "float32", "normal"),), (Result((4,), "float32", 0),))

    class Adds:
        device, l2_bytes = torch.device("cpu"), 0

        def prepare(self, source, tensors):
            assert tensors[0].data_ptr() == tensors[1].data_ptr()
            return lambda: tensors[0].add_(1)

        def time_us(self, launches, *, careful, give_up_us):
            return 1.0, True

    params = [{"kind": "arg", "index": 0}, {"kind": "result", "index": 0}]
    bench = Bench(signature, Adds())
    outcome = bench.measure({"scratch": [], "params": params})
    assert outcome.ok
    assert not torch.equal(bench.pristine[0], pristine)


def test_sets_of_buffers_overflow_the_cache_but_share_what_is_warm():
    cold, warm = Argument((1000,), "float32", "normal"), Argument((10,), "float32", "normal", cold=False)
    bench = Bench(Signature((cold, warm), (Result((5,), "float32"),)), Interpreted(l2_bytes=10_000))
    assert len(bench.sets) == 1 + 5
    assert sum(4000 for _ in bench.sets) > 2 * 10_000
    assert len({s["arg"][0].data_ptr() for s in bench.sets}) == 6
    assert len({s["arg"][1].data_ptr() for s in bench.sets}) == 1
    assert bench.nbytes == 7 * 4000 + 2 * 40 + 20


@pytest.mark.parametrize(
    ("count", "bound", "expected"),
    [(1, 1024, [1023]), (3, 8, [5, 6, 7]), (5, 2, [0, 1, 0, 1, 0]), (2, 1, [0, 0])],
)
def test_integers_reach_the_end_of_what_they_index(count, bound, expected):
    filled = _fill(Argument((count,), "int64", "index", bound), torch.device("cpu"), torch.Generator())
    assert filled.tolist() == expected


GATHER = """
func.func @take(%table: tensor<50x8xf32>, %at: tensor<4xi64>, %limit: tensor<1xi64>) -> tensor<4x8xf32> attributes {topo.function = "take"} {
  %e = tensor.empty() : tensor<4x8xf32>
  %r = linalg.generic {indexing_maps = [affine_map<(i, j) -> (i)>, affine_map<(i, j) -> (0)>, affine_map<(i, j) -> (i, j)>],
                       iterator_types = ["parallel", "parallel"]}
      ins(%at, %limit : tensor<4xi64>, tensor<1xi64>) outs(%e : tensor<4x8xf32>) {
  ^bb0(%i: i64, %l: i64, %o: f32):
    %j = linalg.index 1 : index
    %n = arith.index_cast %j : index to i64
    %small = arith.cmpi sle, %n, %l : i64
    %k = arith.index_cast %i : i64 to index
    %v = tensor.extract %table[%k, %j] : tensor<50x8xf32>
    %z = arith.constant 0.0 : f32
    %s = arith.select %small, %v, %z : f32
    linalg.yield %s : f32
  } -> tensor<4x8xf32>
  return %r : tensor<4x8xf32>
}
"""


def test_bounds_of_integers_come_from_what_they_index():
    module = kernel_module(GATHER)
    signature = signature_of(only_kernel(module))
    at, limit, table = signature.arguments
    assert (table.fill, at.fill, at.bound, limit.fill, limit.bound) == ("normal", "index", 50, "index", 8)
    assert Signature.of_json(signature.as_json()) == signature


@pytest.mark.parametrize(
    ("ours", "expected", "word"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.00001]), ""),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.1]), "off by 0.1"),
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 2.0]), "NaN"),
        (torch.tensor([float("inf"), 1.0]), torch.tensor([float("inf"), 1.0]), ""),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), "1 of 2 integers"),
        (torch.ones(4, dtype=torch.bfloat16), torch.full((4,), 1.0078125, dtype=torch.bfloat16), ""),
        (torch.ones(4, dtype=torch.bfloat16), torch.full((4,), 1.0625, dtype=torch.bfloat16), "off by"),
    ],
)
def test_mismatches(ours, expected, word):
    found = gate.mismatch([ours], [expected])
    assert word in found if word else found == ""


def test_nan_and_signed_zero_count_as_bits():
    assert gate.same_bits(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
    assert not gate.same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))


def test_the_compile_worker_fills_in_shared_memory_and_names_faults(sample):
    _, source, _ = sample
    pool = Pool(1, "topo_opt.tuning.compile_worker", ("cuda", "90", "32"))
    try:
        good, bad = (
            pool.submit(s).result() for s in (asdict(source), changed(source, "tl.sum(", "tl.summ("))
        )
        assert 0 <= good["shared"] <= MAX_SHARED_BYTES
        assert "summ" in bad["error"]
    finally:
        pool.close()


def test_a_worker_that_dies_is_named_and_started_again():
    worker = LineProcess("topo_opt.tuning.compile_worker", ("cuda",))
    for _ in range(2):
        with pytest.raises(WorkerDied, match=r"code 1: ValueError"):
            worker.ask({}, 60)
    silent = LineProcess("timeit", ("-n1", "-r1", "-s", "import time", "time.sleep(60)"))
    with pytest.raises(WorkerDied, match="no answer"):
        silent.ask({}, 0.2)
    assert silent.process is None


def test_a_server_opens_kernels_again_that_were_closed_for_memory(sample):
    signature, source, _ = sample
    server = Server(Interpreted(), memory_bytes=1)
    opened = {"signature": signature.as_json(), "reference": asdict(source)}
    assert server.answer({"case": "a", **opened}) == {"open": ""}
    request = {"case": "a", "source": asdict(source), "careful": False}
    assert server.answer(request) == {"us": 1.0}
    assert server.answer({"case": "b", **opened}) == {"open": ""}
    assert server.answer(request) == {"closed": True}


class Scripted:
    """Stands for the worker processes: answers from a list."""

    def __init__(self, *answers):
        self.answers, self.requests = list(answers), []

    def ask(self, request, timeout_s):
        self.requests.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def submit(self, request):
        from concurrent.futures import Future

        future: Future = Future()
        future.set_result(self.ask(request, 0))
        return future


def measurer_with(pool: Scripted, gpu: Scripted) -> GpuMeasurer:
    measurer = GpuMeasurer.__new__(GpuMeasurer)
    measurer.count, measurer.pool, measurer.gpu = 1, pool, gpu  # type: ignore[assignment]
    measurer.shared_limit, measurer.opened = 1000, set()
    return measurer


def test_outcomes_follow_the_answers_of_the_workers(sample):
    signature, source, _ = sample
    case = Case("k", signature, source)
    jobs = [Job(case, {"x": n}, source) for n in range(6)]
    pool = Scripted({"shared": 10}, {"error": "no"}, {"shared": 2000}, *[{"shared": 10}] * 3)
    gpu = Scripted({"open": ""}, {"us": 5.0}, WorkerDied("illegal access"), {"open": ""}, {"reason": "a race"}, {"closed": True},
                   {"open": ""}, {"us": 7.0})  # fmt: skip
    outcomes = [o for _, o in measurer_with(pool, gpu).run(jobs, time.monotonic() + 60)]
    assert [o.us for o in outcomes] == [5.0, 0, 0, 0, 0, 7.0]
    words = ["", "does not compile: no", "2000 bytes of shared memory", "illegal access", "a race", ""]
    assert all(w in o.reason for w, o in zip(words, outcomes))
    assert all(o.tried for o in outcomes)


def test_nothing_is_tried_after_the_deadline(sample):
    signature, source, _ = sample
    jobs = [Job(Case("k", signature, source), {"x": 1}, source)]
    pool = Scripted()
    ((_, outcome),) = measurer_with(pool, Scripted()).run(jobs, time.monotonic() - 1)
    assert not outcome.tried and not pool.requests


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({}, ""),
        ({"cores": 66}, "cores 66"),
        ({"capability": 100}, "capability 100"),
        ({"name": "NVIDIA B200"}, "not 'NVIDIA H200"),
    ],
)
def test_only_the_device_of_the_topology_is_measured_on(change, word):
    found = difference(device(), {"name": "NVIDIA H200", "capability": 90, "cores": 132, **change})
    assert word in found if word else found == ""


def test_without_a_gpu_the_reason_is_given():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert find_gpu(device()) == (None, "there is no GPU here")
