"""Random small programs through the whole line against eager PyTorch, within the float64 rule."""

import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from topo_opt_case import compiled

from topo_opt.runtime.numerics import compare

# Steps from a tensor of shape (B, S, 8) to one of the same shape; `v` is an earlier value, `w` an 8 x 8 weight.
STEPS = {
    "add": lambda x, v, w: x + v,
    "scale by row": lambda x, v, w: x * v.mean(-1, keepdim=True),
    "softmax": lambda x, v, w: F.softmax(x, -1),
    "softmax over rows": lambda x, v, w: F.softmax(x, 1),
    "layer norm": lambda x, v, w: F.layer_norm(x, (8,)),
    "linear": lambda x, v, w: F.linear(x, w),
    "gelu": lambda x, v, w: F.gelu(x),
    "transpose twice": lambda x, v, w: (x.transpose(1, 2) * 2).transpose(1, 2),
    "roll": lambda x, v, w: torch.roll(x, 1, 1) - v,
    "halves": lambda x, v, w: torch.cat((-x[..., 4:], x[..., :4]), -1),
    "cumulate": lambda x, v, w: x.cumsum(1) / 4,
    "attend": lambda x, v, w: F.scaled_dot_product_attention(x[:, None], v[:, None], v[:, None])[:, 0],
    "attend causally": lambda x, v, w: F.scaled_dot_product_attention(
        x[:, None], v[:, None], v[:, None], is_causal=True
    )[:, 0],
    "last row": lambda x, v, w: x[:, -1:].expand(x.shape) * 0.5 + v,
    "row in the middle": lambda x, v, w: x[:, x.shape[1] // 2].sin()[:, None] - v,
    "some columns": lambda x, v, w: torch.cat((x[..., 2:5], v[..., :5]), -1),
    "mask": lambda x, v, w: torch.where(v > 0, x, 0.5 * x),
    "flip": lambda x, v, w: x.flip(1),
    "pad and cut": lambda x, v, w: F.pad(x, (1, 2))[..., 1:9],
    "gather": lambda x, v, w: x.gather(1, (v > 0).long() * (x.shape[1] - 1)),
    "reshape": lambda x, v, w: x.reshape(x.shape[0], -1).sin().view(x.shape),
    "normalise": lambda x, v, w: (x - x.amax((0, 1), keepdim=True)) * 0.5,
}


class Program(torch.nn.Module):
    def __init__(self, steps: list[tuple[str, int]]):
        super().__init__()
        self.steps = steps
        self.weight = torch.nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, x):
        values = [x]
        for name, back in self.steps:
            values.append(STEPS[name](values[-1], values[-1 - back % len(values)], self.weight))
        return values[-1], values[len(values) // 2]


@given(
    st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 7)), min_size=2, max_size=9),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(0, 3),
)
# A compile takes about a second: no shrinking.
@settings(max_examples=8, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
def test_random_programs_match_eager(steps, dtype, batch, length, level):
    torch.manual_seed(0)
    module = Program(steps).to(dtype).eval().requires_grad_(False)
    x = torch.randn(batch, length, 8).to(dtype)
    program = compiled(module, (x,), level=level)
    eager, exact = module(x), Program.forward(module.double(), x.double())
    ours = program(x)
    assert not program.fallbacks
    for position, (o, e, d) in enumerate(zip(ours, eager, exact, strict=True)):
        verdict = compare(o, e, d, f"result {position} of {steps}")
        assert verdict.passed, verdict
