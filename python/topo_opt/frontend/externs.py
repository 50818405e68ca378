"""Which nodes are left to ATen, each with the reason that the report gives."""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from topo_opt.frontend.attention import can_attend
from topo_opt.frontend.contractions import CONTRACTIONS, can_contract
from topo_opt.frontend.convolutions import is_lowered
from topo_opt.frontend.rewrites_quantized import QUANTIZED
from topo_opt.frontend.rewrites_search import MOST_BOUNDARIES
from topo_opt.frontend.top_k import fits_top_k

aten = torch.ops.aten

_REASONS = {
    "sorting has no good Triton form here; torch's is a tuned library": """
        sort topk argsort msort kthvalue median nanmedian mode quantile nanquantile searchsorted bucketize""",
    "convolutions go to cuDNN": """
        convolution convolution_overrideable _convolution cudnn_convolution conv1d conv2d conv3d conv_transpose1d
        conv_transpose2d conv_transpose3d conv_tbc thnn_conv2d slow_conv3d conv_depthwise3d _slow_conv2d_forward
        convolution_backward deform_conv2d""",
    "it draws from torch's random generator": """
        bernoulli cauchy dropout native_dropout alpha_dropout feature_dropout feature_alpha_dropout exponential geometric
        log_normal multinomial normal normal_functional poisson rand rand_like randint randint_like randn randn_like random
        randperm rrelu rrelu_with_noise rrelu_with_noise_functional uniform binomial _sample_dirichlet _standard_gamma""",
    "linear algebra goes to cuSOLVER and cuBLAS": """
        _linalg_det _linalg_eigh _linalg_eigvals _linalg_slogdet _linalg_solve_ex _linalg_svd cdist_forward _cdist_forward
        cholesky cholesky_inverse cholesky_solve det geqrf inverse linalg_cholesky linalg_cholesky_ex linalg_det linalg_eig
        linalg_eigh linalg_eigvals linalg_eigvalsh linalg_householder_product linalg_inv linalg_inv_ex linalg_ldl_factor_ex
        linalg_ldl_solve linalg_lstsq linalg_lu linalg_lu_factor linalg_lu_factor_ex linalg_lu_solve linalg_matrix_exp
        linalg_pinv linalg_qr linalg_slogdet linalg_solve linalg_solve_triangular linalg_svd linalg_svdvals logdet lu_solve
        lu_unpack matrix_exp ormqr pinverse qr slogdet svd triangular_solve""",
    "Fourier transforms go to cuFFT": """
        _fft_c2c _fft_c2r _fft_r2c fft_fft fft_ifft fft_rfft fft_irfft stft istft""",
    "the experts' products go to torch's grouped GEMM": "_grouped_mm _scaled_grouped_mm",
    "scaled low-precision products go to cuBLAS": """
        _scaled_mm _int_mm _weight_int4pack_mm _weight_int4pack_mm_for_cpu""",
    "histograms go to torch": "histc histogram bincount _histogramdd_bin_edges _histogramdd_from_bin_cts",
    "recurrent layers go to cuDNN": "lstm gru rnn_tanh rnn_relu _cudnn_rnn mkldnn_rnn_layer _thnn_fused_lstm_cell",
    "quantized tensors are left to torch": """
        quantize_per_tensor quantize_per_channel dequantize fake_quantize_per_tensor_affine""",
    "sampling at computed places goes to torch": "grid_sampler grid_sampler_3d affine_grid_generator",
    "its algorithm is sequential": "_ctc_loss ctc_loss _pdist_forward _embedding_bag unique_consecutive",
}
_KNOWN = {name: reason for reason, names in _REASONS.items() for name in names.split()}
_OURS = ("aten", "prims")


# What is lowered although its name is on the list above: op -> when.
_LOWERED: dict[Any, tuple[Callable[[fx.Node], bool], ...]] = {
    aten.bucketize.Tensor: (lambda node: node.args[1].meta["val"].numel() <= MOST_BOUNDARIES,),
    aten.bucketize.Scalar: (lambda node: node.args[1].meta["val"].numel() <= MOST_BOUNDARIES,),
    aten.topk.default: (fits_top_k,),
    aten.rrelu_with_noise_functional.default: (lambda node: not _argument(node, 4, "training", False),),
}


def _argument(node: fx.Node, position: int, name: str, default: Any) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def schema_name(target: Any) -> str:
    """`aten::add` for any overload of it; empty for what is no op."""
    return target._schema.name if isinstance(target, OpOverload) else ""


def known_reason(node: fx.Node) -> str | None:
    """Why this node of a static graph is left to ATen without trying to lower it, or None."""
    target = node.target
    if not isinstance(target, OpOverload):
        return None
    if target._schema.name in QUANTIZED or any(applies(node) for applies in _LOWERED.get(target, ())):
        return None
    namespace, _, name = target._schema.name.partition("::")
    if namespace not in _OURS:
        return f"it is a custom op of '{namespace}'"
    if name in _KNOWN:
        return None if is_lowered(node) else _KNOWN[name]
    if target in CONTRACTIONS:
        operands = [a for a in node.args if isinstance(a, fx.Node)]
        pair = operands[1:3] if "add" in name else operands[:2]
        return None if can_contract(*pair) else "a product on types without a kernel"
    if target is aten.scaled_dot_product_attention.default:
        return can_attend(*node.args, **node.kwargs)  # type: ignore[arg-type]
    if _accumulates(node, name) and _values(node)[-1].dtype == torch.bool:
        return "adding booleans is their disjunction, which an indexed update has no form for"
    if any(_is_exotic(value) for value in _values(node)):
        return "quantized, sparse or nested tensors are left to torch"
    return None


def _accumulates(node: fx.Node, name: str) -> bool:
    if name in ("index_put", "_unsafe_index_put"):
        return bool(node.args[3] if len(node.args) > 3 else node.kwargs.get("accumulate"))
    return name in ("scatter_add", "index_add", "scatter_reduce")


def can_leave(node: fx.Node) -> bool:
    """Whether the node can be a call of ATen in the plan: an op by name whose results are all tensors."""
    results = node.meta["val"]
    results = results if isinstance(results, list | tuple) else [results]
    return isinstance(node.target, OpOverload) and any(isinstance(r, torch.Tensor) for r in results)


def _values(node: fx.Node) -> list[Any]:
    values = [n.meta.get("val") for n in node.all_input_nodes]
    results = node.meta["val"]
    return values + (list(results) if isinstance(results, list | tuple) else [results])


def _is_exotic(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (
        value.is_quantized or value.layout is not torch.strided or value.is_nested
    )
