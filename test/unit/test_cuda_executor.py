"""runtime.cuda without a GPU: a stand-in driver records what would be launched; graphs need the real machine."""

import gc
from dataclasses import replace

import plan_samples as samples
import pytest
import test_bundle
import torch

from topo_opt.errors import InputError
from topo_opt.runtime import cuda, load
from topo_opt.runtime.executor import kernel_arguments
from topo_opt.runtime.kernel_module import load_function
from topo_opt.runtime.plan import Descriptor, Kernel, KernelParam
from topo_opt.runtime.steps import StepFailed

triton = pytest.importorskip("triton")


class RecordingDriver:
    """A sm_90 that never runs anything."""

    def __init__(self):
        self.launches, self.utils = [], self

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 77

    def get_device_properties(self, device):
        return {"max_shared_mem": 232448, "multiprocessor_count": 132}

    def load_binary(self, name, kernel, shared, device):
        assert kernel[:4] == b"\x7fELF"
        return object(), f"handle of {name}", 32, 0, 1024

    def unload_module(self, module):
        return None

    def launcher_cls(self, source, metadata):
        def launch(x, y, z, stream, function, packed, *rest):
            self.launches.append(((x, y, z), stream, function, metadata, rest[3:]))

        return launch


@pytest.fixture
def driver(monkeypatch):
    from triton.runtime.driver import driver as config

    fake = RecordingDriver()
    monkeypatch.setattr(config, "_active", fake)
    yield fake
    fake.launches.clear()
    gc.collect()  # compiled kernels unload themselves through the driver


def launch_of(source, tensors, **changes):
    params = tuple(KernelParam(p.name, p.dtype) for p in source.params)
    kernel = Kernel(
        f"kernels/{source.name}.py", source.name, "loops", params, source.grid, source.num_warps, 2, dict(source.constexprs), **changes
    )  # fmt: skip
    function = load_function(source.source, kernel.file, source.name)
    arguments = kernel_arguments(kernel, tensors)
    return cuda.Launch(source.name, function, kernel, [arguments[n] for n in function.arg_names])


def test_a_launch_goes_to_the_driver_with_every_argument_in_order(driver):
    tensors = [torch.ones(100) for _ in range(3)]
    launch = launch_of(samples.add_kernel("k_add", "fp32", 100), tensors)
    launch()
    launch()
    assert len(driver.launches) == 2
    grid, stream, function, metadata, arguments = driver.launches[0]
    assert grid == (2, 1, 1) and stream == 77 and function == "handle of k_add"
    assert (metadata.num_warps, metadata.num_stages) == (4, 2)
    given = [a for a in arguments if isinstance(a, torch.Tensor)]
    assert [g.data_ptr() for g in given] == [t.data_ptr() for t in tensors]
    assert not metadata.launch_pdl


def test_dependent_launch_is_asked_for(driver):
    launch = launch_of(samples.add_kernel("k_add", "fp32", 64), [torch.ones(64) for _ in range(3)], pdl=True)
    launch()
    assert driver.launches[0][3].launch_pdl


def test_a_misaligned_view_gets_code_of_its_own(driver):
    base = torch.ones(128)
    aligned = launch_of(samples.add_kernel("k_add", "fp32", 64), [base[:64]] * 3)
    shifted = launch_of(samples.add_kernel("k_add", "fp32", 64), [base[1:65]] * 3)
    aligned()
    shifted()
    first, second = (entry[3].hash for entry in driver.launches)
    assert first != second


def test_kernels_are_compiled_once_each_by_several_threads(driver, monkeypatch):
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    launches = [
        launch_of(samples.add_kernel(f"k_{i}", "fp32", 64), [torch.ones(64) for _ in range(3)])
        for i in range(3)
    ]
    cuda.compile_all(launches, torch.device("cuda"))
    assert all(launch.call is not None for launch in launches) and not driver.launches


def test_a_kernel_that_does_not_compile_is_named(driver):
    source = samples.add_kernel("k_add", "fp32", 64)
    broken = replace(source, source=source.source.replace("a + b", "a @ b"))
    with pytest.raises(StepFailed, match="kernel k_add does not compile") as caught:
        cuda.compile_all([launch_of(broken, [torch.ones(64)] * 3)], torch.device("cuda"))
    assert not caught.value.mutated


def test_descriptors_are_made_once_on_the_host():
    kernel = Kernel(
        "kernels/k.py", "k", "gemm", (KernelParam("a", "bf16", Descriptor((8, 16), (16, 1), (8, 16))),),
        (1, 1, 1), 4, 1, {},
    )  # fmt: skip
    tensor = torch.zeros(8, 16, dtype=torch.bfloat16)
    made = kernel_arguments(kernel, [tensor])["a"]
    assert made.base is tensor and list(made.block_shape) == [8, 16]


@pytest.mark.skipif(torch.cuda.is_available(), reason="only without a GPU")
def test_without_a_gpu_the_error_says_what_to_use(tmp_path):
    folder = test_bundle.write(tmp_path / "b")
    with pytest.raises(InputError, match="torch sees no GPU") as caught:
        load(folder, "cuda", random_weights=0)
    assert caught.value.hint == "use device='cpu'"
