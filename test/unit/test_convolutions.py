"""Convolutions against eager: every form, with channels last around ATen's, as products and as sums over windows."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import topo_opt
from topo_opt.runtime import Program


class Between(nn.Module):
    """A layer with something that fuses in front and behind."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(F.relu(x)))


def compiled(module: nn.Module, *args: torch.Tensor, level: int = 2, **options) -> Program:
    return topo_opt.compile(module.eval(), args, topology="cpu", level=level, tune="off", **options)


def assert_equals_eager(program: Program, module: nn.Module, *args: torch.Tensor) -> None:
    """Close to eager, without a fallback, and contiguous as eager's result is."""
    with torch.no_grad():
        expected = module(*args)
    got = program(*args)
    assert not program.fallbacks
    assert got.dtype == expected.dtype and got.is_contiguous() and expected.is_contiguous()
    exact = expected.dtype == torch.float32
    torch.testing.assert_close(got, expected, rtol=1e-5 if exact else 2e-2, atol=2e-6 if exact else 2e-2)


def steps(program: Program) -> list[str]:
    (variant,) = program.variants("main")
    return [type(step).__name__ for step in variant.steps]


# Layer, shape of its input, number of calls left to ATen.
FORMS = {
    "1d": (lambda: nn.Conv1d(64, 128, 3), (2, 64, 11), 1),
    "1d, strided and dilated": (lambda: nn.Conv1d(64, 256, 3, stride=2, padding=2, dilation=2), (2, 64, 11), 1),
    "2d": (lambda: nn.Conv2d(32, 64, 3, padding=1), (2, 32, 7, 8), 1),
    "2d, one place": (lambda: nn.Conv2d(32, 64, 3), (2, 32, 3, 3), 1),
    "2d, padding by name": (lambda: nn.Conv2d(32, 48, (4, 3), padding="same", dilation=(1, 2)), (2, 32, 7, 8), 1),
    "2d, no padding by name": (lambda: nn.Conv2d(32, 64, 3, padding="valid"), (2, 32, 7, 8), 1),
    "2d, no batch": (lambda: nn.Conv2d(32, 64, 3), (32, 7, 8), 1),
    "2d, groups": (lambda: nn.Conv2d(4, 6, 3, groups=2), (2, 4, 7, 8), 1),
    "2d, wide and of one element": (lambda: nn.Conv2d(96, 128, 1), (1, 96, 3, 4), 1),
    "3d": (lambda: nn.Conv3d(8, 24, (2, 3, 3), padding=(0, 1, 1)), (2, 8, 4, 5, 6), 1),
    "1d, transposed": (lambda: nn.ConvTranspose1d(4, 6, 3, 2, 1, 1), (2, 4, 7), 1),
    "2d, transposed": (lambda: nn.ConvTranspose2d(4, 6, 3, (2, 1), 1, (1, 0)), (2, 4, 5, 6), 1),
    "2d, transposed and dilated": (lambda: nn.ConvTranspose2d(4, 6, 3, dilation=2, bias=False), (2, 4, 5, 6), 1),
    "2d, transposed with groups": (lambda: nn.ConvTranspose2d(4, 6, 3, groups=2), (2, 4, 5, 6), 1),
    "3d, transposed": (lambda: nn.ConvTranspose3d(3, 4, 3, 2, 1, 1), (1, 3, 3, 4, 2), 1),
    "1d, one element": (lambda: nn.Conv1d(4, 6, 1), (2, 4, 11), 0),
    "2d, one element": (lambda: nn.Conv2d(4, 6, 1), (2, 4, 7, 8), 0),
    "2d, one element and strided": (lambda: nn.Conv2d(4, 6, 1, stride=(2, 3)), (2, 4, 7, 8), 0),
    "2d, patches": (lambda: nn.Conv2d(3, 10, 4, stride=4), (2, 3, 8, 12), 0),
    "2d, patches and a rest": (lambda: nn.Conv2d(3, 10, (2, 4), stride=(2, 4), bias=False), (2, 3, 7, 13), 0),
    "3d, patches": (lambda: nn.Conv3d(2, 6, 2, stride=2), (1, 2, 4, 6, 4), 0),
    "1d, depthwise": (lambda: nn.Conv1d(6, 6, 4, padding=3, groups=6), (2, 6, 9), 0),
    "2d, depthwise": (lambda: nn.Conv2d(6, 6, 3, padding=1, groups=6), (2, 6, 7, 8), 0),
    "2d, depthwise and dilated": (lambda: nn.Conv2d(6, 6, (3, 5), 2, (2, 4), (2, 2), 6, False), (2, 6, 9, 11), 0),
    "2d, depthwise with two a channel": (lambda: nn.Conv2d(6, 12, 3, groups=6), (2, 6, 7, 8), 1),
    "1d, windows": (lambda: nn.Conv1d(4, 6, 3), (2, 4, 11), 0),
    "1d, windows strided and dilated": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=2, dilation=2), (2, 4, 11), 0),
    "2d, windows": (lambda: nn.Conv2d(4, 6, 3, padding=1), (2, 4, 7, 8), 0),
    "2d, windows of one channel": (lambda: nn.Conv2d(1, 6, 3), (2, 1, 7, 8), 0),
    "2d, asymmetric": (lambda: nn.Conv2d(3, 6, (5, 1), (2, 1), (2, 0), (1, 3), bias=False), (2, 3, 9, 7), 0),
    "2d, one window": (lambda: nn.Conv2d(4, 6, 3), (2, 4, 3, 3), 0),
    "2d, windows padded by name": (lambda: nn.Conv2d(4, 6, (4, 3), padding="same", dilation=(1, 2)), (2, 4, 7, 8), 0),
    "2d, windows without a batch": (lambda: nn.Conv2d(4, 6, 3), (4, 7, 8), 0),
    "2d, windows of few to many channels": (lambda: nn.Conv2d(3, 40, 3, 2, 1), (3, 3, 11, 9), 0),
    "3d, windows": (lambda: nn.Conv3d(3, 4, (2, 3, 3), padding=(0, 1, 1)), (2, 3, 4, 5, 6), 0),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_form(form: str) -> None:
    torch.manual_seed(0)
    layer, shape, left = FORMS[form]
    module, x = Between(layer()), torch.randn(shape)
    program = compiled(module, x)
    assert_equals_eager(program, module, x)
    assert steps(program).count("AtenStep") == left


@pytest.mark.parametrize(
    "form", ["1d", "2d", "2d, transposed", "3d", "2d, one element", "2d, patches", "2d, depthwise"]
)
def test_form_in_half(form: str) -> None:
    torch.manual_seed(0)
    layer, shape, _ = FORMS[form]
    module, x = Between(layer()).bfloat16(), torch.randn(shape).bfloat16()
    assert_equals_eager(compiled(module, x), module, x)


@pytest.mark.parametrize("level", [0, 1])
def test_other_levels(level: int) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(4, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 48, 3),
        nn.Conv2d(48, 4, 1),
        nn.Conv2d(4, 4, 3, groups=4),
    )
    x = torch.randn(2, 4, 6, 5)
    assert_equals_eager(compiled(module, x, level=level), module, x)


class Residual(nn.Module):
    """Convolutions, batch norms, pooling, and an operand that goes around two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(32, 48, 3, padding=1)
        self.a, self.b = (nn.Conv2d(48, 48, 3, padding=1, bias=False) for _ in range(2))
        self.na, self.nb = nn.BatchNorm2d(48), nn.BatchNorm2d(48)
        for norm in (self.na, self.nb):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
        self.head = nn.Linear(48, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.stem(x)), 3, 2, 1)
        x = F.relu(x + self.nb(self.b(F.relu(self.na(self.a(x))))))
        x = torch.cat([x, F.avg_pool2d(x, 3, 1, 1)], 1)[:, 24:72]
        return self.head(x.mean((2, 3)))


def test_between_convolutions_nothing_changes_its_order() -> None:
    torch.manual_seed(0)
    module, x = Residual(), torch.randn(2, 32, 9, 10)
    program = compiled(module, x)
    assert_equals_eager(program, module, x)
    (variant,) = program.variants("main")
    found = steps(program)
    assert found.count("AtenStep") == 3
    # The input's order, pool, norm and norm with its operand, and what comes behind: no transpose has a kernel.
    between = found[found.index("AtenStep") :]
    assert between[:6] == ["AtenStep", "KernelStep", "AtenStep", "KernelStep", "AtenStep", "KernelStep"]
    assert len(variant.load_steps) == 3


@pytest.mark.parametrize("norm", [lambda: nn.GroupNorm(3, 48), lambda: nn.InstanceNorm2d(48)])
def test_norms_read_what_a_convolution_made(norm) -> None:
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Conv2d(48, 48, 3), norm(), nn.Tanh()), torch.randn(2, 48, 9, 8)
    program = compiled(module, x)
    assert_equals_eager(program, module, x)
    found = steps(program)
    # The bias is no kernel of its own, although statistics and what is normalized both read it.
    assert len(found[found.index("AtenStep") + 1 :]) <= 2


def test_every_bucket_has_its_shapes_and_all_share_the_weights() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 48, 3)).eval()
    batch, height = torch.export.Dim("batch", min=1, max=8), torch.export.Dim("height", min=4, max=32)
    program = compiled(
        module, torch.randn(2, 32, 8, 7), dynamic_shapes=({0: batch, 2: height},),
        buckets={"batch": (1, 3), "height": (6, 9)},
    )  # fmt: skip
    variants = program.variants("main")
    assert len(variants) == 4
    names = {tuple(sorted(b.name for b in v.buffers if b.kind == "prepared")) for v in variants}
    assert len(names) == 1 and len(next(iter(names))) == 2
    for n, h in ((1, 6), (3, 9), (3, 6)):
        assert_equals_eager(program, module, torch.randn(n, 32, h, 7))


def test_any_order_of_the_callers_tensor() -> None:
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Conv2d(32, 64, 3), nn.ReLU()), torch.randn(2, 32, 7, 8)
    program = compiled(module, x)
    with torch.no_grad():
        expected = module(x)
    got = program(x.to(memory_format=torch.channels_last))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    assert got.is_contiguous()


def test_a_weight_that_is_changed_in_place_is_followed() -> None:
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Conv2d(32, 64, 3), nn.ReLU()), torch.randn(2, 32, 7, 8)
    program = compiled(module, x)
    assert_equals_eager(program, module, x)
    with torch.no_grad():
        module[0].weight.mul_(-1.5)
    assert_equals_eager(program, module, x)


def test_weights_that_a_bundle_holds_are_prepared_when_it_is_loaded(tmp_path) -> None:
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Conv2d(32, 64, 3), nn.ReLU()), torch.randn(2, 32, 7, 8)
    compiled(module, x, out=tmp_path / "bundle")
    assert_equals_eager(topo_opt.load(tmp_path / "bundle", device="cpu"), module, x)


def test_other_types_stay_calls_of_their_operator() -> None:
    module, x = Between(nn.Conv2d(4, 6, 3).double()), torch.randn(2, 4, 7, 8, dtype=torch.float64)
    program = compiled(module, x)
    with torch.no_grad():
        torch.testing.assert_close(program(x), module(x))
    (variant,) = program.variants("main")
    assert [s.op for s in variant.steps if hasattr(s, "op")] == ["aten.conv2d.default"]
