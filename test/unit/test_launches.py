"""runtime.launches: the C launcher is called with what Triton's own launcher would give it, for every way of calling it."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from topo_opt.runtime.launches import prepared

triton = pytest.importorskip("triton")


class Flat:
    """A launcher as Triton 3.6 has it: the kernel's arguments follow one by one."""

    global_scratch_size = profile_scratch_size = 0

    def __init__(self, function, *, pdl=False):
        self.launch, self.launch_pdl, self.launch_cooperative_grid = function, pdl, False

    def __call__(self, x, y, z, stream, function, *rest):
        self.launch(
            x, y, z, stream, function, self.launch_cooperative_grid, self.launch_pdl, None, None, *rest
        )


class Packed(Flat):
    """As Triton 3.9 has it: the kernel's arguments are one tuple, after what describes them."""

    def __call__(self, x, y, z, stream, function, packed, metadata, before, after, *rest):
        self.launch(
            x, y, z, stream, function, self.launch_cooperative_grid, self.launch_pdl, packed, metadata, before,
            after, None, None, b"annotations", b"signature", rest,
        )  # fmt: skip


class Recorder:
    def __init__(self):
        self.calls = []

    def __call__(self, *arguments):
        self.calls.append(arguments)


def compiled_of(launcher):
    return SimpleNamespace(run=launcher, function=55, packed_metadata=(4, 1, 0))


KINDS = pytest.mark.parametrize("kind", [Flat, Packed])


@KINDS
@pytest.mark.parametrize("dependent", [False, True])
def test_the_c_function_is_called_as_the_launcher_calls_it(kind, dependent):
    c, launcher = Recorder(), None
    launcher = kind(c, pdl=True)
    x = torch.ones(4)
    run, lasting = prepared(compiled_of(launcher), (2, 3, 1), [x, 64], 77, dependent=dependent)
    assert lasting and not c.calls and launcher.launch is c and launcher.launch_pdl
    run()
    launcher.launch_pdl = dependent
    launcher(2, 3, 1, 77, 55, (4, 1, 0), None, None, None, x.data_ptr(), 64)
    assert c.calls[0] == c.calls[1]


@KINDS
def test_what_is_kept_holds_no_tensor(kind):
    x = torch.ones(4)
    watched = weakref.ref(x)
    run, lasting = prepared(compiled_of(kind(Recorder())), (1, 1, 1), [x], 0, dependent=True)
    del x
    gc.collect()
    assert lasting and watched() is None
    run()


def wrapped(function, kernel_arguments_of):
    """As Triton's encoding of descriptors: a closure over the C function, named `launcher`."""

    def outer(launcher):
        def inner(*args):
            return launcher(*kernel_arguments_of(args))

        return inner

    return outer(function)


def test_descriptors_are_encoded_once_and_their_tensors_not_kept():
    encoded = []

    def encode(args):
        out = []
        for a in args:
            if hasattr(a, "base"):
                encoded.append(a.base.data_ptr())
                out += [f"map of {a.base.data_ptr()}", *a.shape, *a.strides]
            else:
                out.append(a)
        return out

    c = Recorder()
    launcher = Flat(wrapped(c, encode))
    base = torch.ones(8, 16, dtype=torch.bfloat16)
    descriptor = SimpleNamespace(base=base, shape=[8, 16], strides=[16, 1])
    run, lasting = prepared(compiled_of(launcher), (1, 1, 1), [descriptor, 3], 0, dependent=True)
    watched, at = weakref.ref(base), base.data_ptr()
    del base, descriptor
    gc.collect()
    run()
    run()
    assert lasting and len(encoded) == 1 and watched() is None
    assert c.calls[0][-6:] == (f"map of {at}", 8, 16, 16, 1, 3)


def test_tritons_own_encoding_of_descriptors(monkeypatch):
    from triton.backends.nvidia import driver
    from triton.runtime.driver import driver as config
    from triton.tools.tensor_descriptor import TensorDescriptor

    utils = SimpleNamespace(fill_tma_descriptor_tiled=lambda address, *rest: f"map of {address}")
    utils.fill_tma_descriptor = utils.fill_tma_descriptor_tiled
    monkeypatch.setattr(config, "_active", SimpleNamespace(utils=utils))
    meta = [{"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [8, 16], "fp4_padded": False}]
    signature = {0: "*bf16", 1: "tensordesc<bf16[8, 16]>", 2: "constexpr"}
    c = Recorder()
    launch = driver.wrap_handle_tensordesc(c, signature, meta)
    packed = hasattr(driver, "annotate_arguments")
    base = torch.ones(8, 16, dtype=torch.bfloat16)
    arguments = [base, TensorDescriptor(base, [8, 16], [16, 1], [8, 16]), 64]
    launcher = (Packed if packed else Flat)(launch)
    run, lasting = prepared(compiled_of(launcher), (1, 1, 1), arguments, 7, dependent=True)
    run()
    last = list(c.calls[0][-1]) if packed else list(c.calls[0][-7:])
    assert lasting and last == [base.data_ptr(), f"map of {base.data_ptr()}", 8, 16, 16, 1, 64]


def test_launchers_that_allocate_or_are_not_known_are_called_themselves():
    calls = Recorder()
    x = torch.ones(4)
    run, lasting = prepared(compiled_of(calls), (1, 1, 1), [x], 7, dependent=True)
    run()
    assert lasting and calls.calls == [(1, 1, 1, 7, 55, (4, 1, 0), None, None, None, x.data_ptr())]
    launcher = Flat(calls)
    launcher.global_scratch_size = 128
    descriptor = SimpleNamespace(base=x, shape=[4], strides=[1])
    run, lasting = prepared(compiled_of(launcher), (1, 1, 1), [descriptor], 7, dependent=True)
    run()
    assert not lasting and calls.calls[1][-1] is descriptor
