"""runtime.cuda from the choice of a mode to repeated calls, on a GPU that is played: kernels run in the interpreter, a graph is the
list of what was launched while it was captured."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import plan_samples as samples
import pytest
import test_bundle
import test_direct
import torch
from direct_launcher import Interpreted

from topo_opt.api import compile as compile_model
from topo_opt.codegen.bundle import write_bundle
from topo_opt.errors import InputError, StrictError, TopoError
from topo_opt.runtime import cuda, direct_parts, interpreter, load, steps
from topo_opt.runtime.steps import StepFailed

pytest.importorskip("triton")


class Played:
    """Events, streams, graphs."""

    def __init__(self):
        self.stream, self.capturing, self.replays, self.waits = 11, None, 0, 0

    def event(self):
        return SimpleNamespace(record=lambda stream: None)

    def current_stream(self, device=None):
        return SimpleNamespace(
            wait_event=self.waited, wait_stream=lambda other: None, synchronize=lambda: None
        )

    def waited(self, event):
        self.waits += 1

    def graph_of(self):
        recorded = []

        def replay():
            self.replays += 1
            with interpreter.interpreting():
                for step in recorded:
                    step()

        return SimpleNamespace(steps=recorded, replay=replay)

    def capturable(self, step):
        """A step that is recorded while a graph is captured, else run."""

        def run():
            if self.capturing is not None:
                self.capturing.append(step)
                return
            with interpreter.interpreting():
                step()

        return run

    @contextmanager
    def capture(self, graph, **options):
        self.capturing = graph.steps
        try:
            yield
        finally:
            self.capturing = None


class PlayedLaunch(Interpreted):
    """A launch of `cuda`, bound to tensors."""

    def __init__(self, owner, name, kernel, tensors):
        super().__init__(owner, name, kernel)
        self.tensors, self.call = tensors, None

    def compile(self):
        if self.owner.broken:
            raise RuntimeError("no such instruction")
        self.call = self.compile

    def __call__(self):
        run, _ = self.on(self.tensors, 0, dependent=True)
        run()

    def on(self, tensors, stream, *, dependent):
        run, lasting = super().on(tensors, stream, dependent=dependent)
        return self.owner.played.capturable(run), lasting


class PlayedExecutor(cuda.CudaExecutor):
    """On the CPU. `lasting` is off: these launches hold tensors."""

    played, lasting, broken = None, False, False

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.prepared, self.ran = [], []

    def prepare(self, name, kernel, tensors):
        return PlayedLaunch(self, name, kernel, tensors)

    def _load_functions(self, names):
        return None


@pytest.fixture
def played(monkeypatch):
    gpu = Played()
    for name, value in {
        "is_available": lambda: True, "device": lambda device: nullcontext(), "Event": gpu.event, "Stream": lambda *a: gpu.current_stream(),
        "stream": lambda stream: nullcontext(), "current_stream": gpu.current_stream, "CUDAGraph": gpu.graph_of, "graph": gpu.capture,
        "graph_pool_handle": lambda: 1, "current_device": lambda: None, "synchronize": lambda device=None: None, "set_device": lambda d: None,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: gpu.stream, raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(cuda, "bytes_per_us", lambda device: 4e6)
    monkeypatch.setattr(cuda, "Launch", PlayedLaunch)
    monkeypatch.setattr(PlayedExecutor, "played", gpu)
    copier = steps._copier
    monkeypatch.setattr(steps, "_copier", lambda target, source: gpu.capturable(copier(target, source)))
    from triton.runtime.driver import driver

    monkeypatch.setattr(driver, "_active", SimpleNamespace(get_current_target=lambda: None))
    return gpu


def open_on(monkeypatch, folder, *, seed=None, **options):
    """A program whose executor is the played one."""
    launch, graphs = options.pop("launch", "auto"), options.pop("graphs", "auto")
    loaded = load(folder, "cpu", random_weights=seed, **options)
    loaded.executor = PlayedExecutor(loaded.bundle, loaded.memory, graphs=graphs, launch=launch)
    return loaded


@pytest.fixture
def cache(tmp_path):
    return test_bundle.write(tmp_path / "cache")


X, ROW = torch.randn(1, 8), torch.tensor([1])
MODES = {"graph": ["graph", "graph", "graph on the caller's tensors"], "direct": ["direct"] * 3}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("static", [False, True])
def test_every_mode_gives_the_same_call_after_call(played, monkeypatch, cache, mode, static):
    ours = open_on(monkeypatch, cache, seed=3, launch=mode, static_results=static)
    reference = load(cache, "cpu", random_weights=3)
    assert ours.status()[0].mode == ""
    for i in range(6):
        X.add_(1)
        ROW.fill_(i % 4)
        for a, b in zip(ours.decode(X, ROW), reference.decode(X, ROW)):
            assert torch.equal(a, b)
        assert torch.equal(ours.state["cache"], reference.state["cache"])
        if i < 3:
            assert ours.status()[0].mode == MODES[mode][i]
    assert not ours.fallbacks and (played.replays == 6) is (mode == "graph")
    x, row = torch.randn(1, 8), torch.tensor([2])
    for a, b in zip(ours.decode(x, row), reference.decode(x, row)):
        assert torch.equal(a, b)


def test_a_result_or_state_as_input_gets_no_graph_of_its_own(played, monkeypatch, cache):
    ours = open_on(monkeypatch, cache, seed=3, launch="graph", static_results=True)
    reference = load(cache, "cpu", random_weights=3)
    x, y = (p.state["cache"][:1] for p in (ours, reference))
    for _ in range(4):
        for a, b in zip(ours.decode(x, ROW), reference.decode(y, ROW)):
            assert torch.equal(a, b)
    assert ours.status()[0].mode == "graph"


def test_a_program_with_state_is_a_graph_and_may_be_asked_to_launch(played, monkeypatch, cache):
    ours = open_on(monkeypatch, cache, seed=3)
    ours.decode(X, ROW)
    assert ours.status()[0].mode == "graph"
    ours = open_on(monkeypatch, cache, seed=3, launch="direct")
    ours.decode(X, ROW)
    assert ours.status()[0].mode == "direct" and not ours.status()[0].graph
    ours = open_on(monkeypatch, cache, seed=3, graphs="off")
    ours.decode(X, ROW)
    assert ours.status()[0].mode == "direct" and ours.status()[0].reason == "graphs are switched off"
    for launch, graphs in (("loud", "auto"), ("graph", "off")):
        with pytest.raises(InputError, match="launch is"):
            load(cache, "cpu", launch=launch, graphs=graphs)


def test_state_is_as_before_when_the_first_call_fails(played, monkeypatch, cache):
    ours = open_on(monkeypatch, cache, seed=3, launch="direct", strict=True)
    before = ours.state["cache"].clone()

    def fail(*arguments):
        ours.state["cache"].add_(1)
        raise StepFailed("kernel k: lost", mutated=True)

    with monkeypatch.context() as patch:
        patch.setattr(ours.executor, "_run_directly", fail)
        with pytest.raises(StrictError, match="the first run failed: kernel k: lost"):
            ours.decode(X, ROW)
    assert torch.equal(ours.state["cache"], before)
    ours.decode(X, ROW)
    assert ours.status()[0].mode == "direct"


def test_a_kernel_that_does_not_compile_is_told_once(played, monkeypatch, cache):
    ours = open_on(monkeypatch, cache, seed=3, launch="direct")
    ours.executor.broken = True
    expected = load(cache, "cpu", random_weights=3).decode(X, ROW)
    assert torch.equal(ours.decode(X, ROW)[0], expected[0])
    ours.executor.broken = False
    ours.decode(X, ROW)
    (reason,) = ours.fallbacks
    assert "does not compile: RuntimeError: no such instruction" in reason and ours.fallbacks[reason] == 2


@pytest.mark.parametrize("launch", ["graph", "direct"])
def test_rewritten_inputs_are_written_in_every_mode(played, monkeypatch, tmp_path, launch):
    body = "%o = call @k_add(%x, %y) : (tensor<8xf32>, tensor<8xf32>) -> tensor<8xf32> return %o, %o : tensor<8xf32>, tensor<8xf32>"
    results = f"{test_direct.NEW_X}, {test_direct.OUT}"
    text = test_direct.plan_function(f"%x: {test_direct.X}, %y: {test_direct.Y}", results, body)
    built = samples.build(test_direct.ADD + text, test_direct.KERNELS)
    folder = write_bundle(tmp_path / "b", built, {k: v.source for k, v in test_direct.KERNELS.items()})
    ours = open_on(monkeypatch, folder, launch=launch)
    x, y = torch.randn(8), torch.randn(8)
    for _ in range(3):
        before = x.clone()
        assert torch.equal(ours(x, y), before + y) and torch.equal(x, before + y)
    kept = ours(x, y)
    x.zero_()
    assert kept.abs().sum() > 0


def test_memory_that_calls_share_is_waited_for_on_another_stream(played, monkeypatch, cache):
    ours = open_on(monkeypatch, cache, seed=3, launch="direct")
    for stream, waits in ((11, 1), (11, 1), (12, 2), (11, 3)):
        played.stream = stream
        ours.decode(X, ROW)
        assert played.waits == waits


def test_replays_for_benchmarks_run_on_the_tensors_of_the_last_call(played, monkeypatch, cache):
    ours = open_on(monkeypatch, cache, seed=3, launch="direct")
    ours.decode(X, ROW)
    ran = len(ours.executor.ran)
    ours.executor.replay_call(ours.variants("decode")[0])()
    assert len(ours.executor.ran) == ran + 4 and not isinstance(ours.status()[0], TopoError)


@pytest.fixture
def convolutions(tmp_path):
    """A module of two convolutions, which are left to ATen, and its bundle."""
    layers = torch.nn.Conv2d(4, 6, 3), torch.nn.ReLU(), torch.nn.Conv2d(6, 4, 3, bias=False), torch.nn.Tanh()
    module = torch.nn.Sequential(*layers).eval().requires_grad_(False)
    compile_model(
        module, (torch.randn(2, 4, 7, 8),), topology="cpu", tune="off", out=tmp_path / "convolutions"
    )
    return module, tmp_path / "convolutions"


def test_what_is_made_of_weights_is_there_for_launches_on_the_callers_tensors(
    played, monkeypatch, convolutions
):
    module, folder = convolutions
    ours = open_on(monkeypatch, folder, launch="direct", weights=dict(module.state_dict()))
    for scale in (1.0, 1.0, -2.0):
        module[0].weight.mul_(scale)
        x = torch.randn(2, 4, 7, 8)
        torch.testing.assert_close(ours(x), module(x), rtol=1e-5, atol=1e-6)
        assert ours.status()[0].mode == "direct" and not ours.fallbacks


def test_a_graph_takes_what_aten_makes_without_a_copy(played, monkeypatch, convolutions):
    module, folder = convolutions
    ours = open_on(monkeypatch, folder, launch="graph")
    call, stored = direct_parts.aten_results, []

    def recorded(*arguments):
        """A graph repeats what ATen computes where it first put it."""
        results = call(*arguments)
        if played.capturing is not None:
            played.capturing.append(lambda: [r.copy_(n) for r, n in zip(results, call(*arguments))])
        return results

    monkeypatch.setattr(direct_parts, "aten_results", recorded)
    for module_of_store in (steps, direct_parts):
        monkeypatch.setattr(module_of_store, "store", lambda *tensors: stored.append(tensors))
    x = torch.randn(2, 4, 7, 8)
    for mode in (*MODES["graph"], MODES["graph"][-1]):
        torch.testing.assert_close(ours(x), module(x), rtol=1e-5, atol=1e-6)
        assert ours.status()[0].mode == mode and not ours.fallbacks
        x.normal_()
    assert played.replays == 4 and not stored
