"""Which ATen ops stay whole when a program is decomposed.

An op is kept when our own rules or torch-mlir lower it better than torch's decomposition does: contractions, attention,
normalisations and activations keep their meaning for fusion, and half-precision ops keep eager's single rounding.
"""

from functools import cache
from typing import Any

import torch

_KEEP = """
_native_batch_norm_legit_no_training _softmax _log_softmax
addbmm addmm addmv avg_pool1d avg_pool2d avg_pool3d baddbmm batch_norm bmm
conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution
dot elu embedding gelu group_norm hardsigmoid hardswish hardtanh
gru index_add index_copy isfinite layer_norm leaky_relu linear log_sigmoid log_softmax masked_fill matmul
lstm max_pool1d max_pool2d max_pool3d mish mm mv native_group_norm native_layer_norm one_hot relu relu6 rms_norm rsqrt
rnn_relu rnn_tanh scaled_dot_product_attention sigmoid silu softmax softplus tanh threshold_backward topk
"""

# Taken apart although torch's default table would not: torch-mlir has no lowering, or only for some sizes.
_TAKE_APART = """
_adaptive_avg_pool2d grid_sampler_2d upsample_linear1d upsample_bilinear2d upsample_trilinear3d
"""


@cache
def keep_table() -> dict[Any, Any]:
    """The decomposition table for `ExportedProgram.run_decompositions`: torch's default without the ops that stay whole."""
    table = torch.export.default_decompositions()
    kept = {getattr(torch.ops.aten, name) for name in _KEEP.split()}
    for op in list(table.keys()):
        if getattr(op, "_overloadpacket", None) in kept:
            del table[op]
    packets = [getattr(torch.ops.aten, name) for name in _TAKE_APART.split()]
    table.update(torch._decomp.get_decompositions([torch.ops.aten.squeeze.dims, *packets]))
    return table
