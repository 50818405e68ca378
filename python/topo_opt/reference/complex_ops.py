"""Table: `complex` ops as torch functions; importing it adds the rows to `SCALAR_OPS`."""

import torch
from torch import Tensor

from topo_opt.reference.scalar_ops import plain


def _create(real: Tensor, imaginary: Tensor) -> Tensor:
    real, imaginary = torch.broadcast_tensors(real, imaginary)
    return torch.complex(real, imaginary)


def _part(index: int):
    return lambda x: torch.view_as_real(x.resolve_conj())[..., index]


plain(
    {
        "complex.abs": torch.abs,
        "complex.add": torch.add,
        "complex.angle": torch.angle,
        "complex.atan2": lambda y, x: -1j * torch.log((x + 1j * y) / torch.sqrt(x * x + y * y)),
        "complex.conj": lambda x: torch.conj(x).resolve_conj(),
        "complex.cos": torch.cos,
        "complex.create": _create,
        "complex.div": torch.div,
        "complex.eq": torch.eq,
        "complex.exp": torch.exp,
        "complex.expm1": torch.expm1,
        "complex.im": _part(1),
        "complex.log": torch.log,
        "complex.log1p": torch.log1p,
        "complex.mul": torch.mul,
        "complex.neg": torch.neg,
        "complex.neq": torch.ne,
        "complex.pow": torch.pow,
        "complex.powi": torch.pow,
        "complex.re": _part(0),
        "complex.rsqrt": torch.rsqrt,
        "complex.sign": torch.sgn,
        "complex.sin": torch.sin,
        "complex.sqrt": torch.sqrt,
        "complex.sub": torch.sub,
        "complex.tan": torch.tan,
        "complex.tanh": torch.tanh,
    }
)
