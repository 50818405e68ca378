"""Reductions and scans in Triton's interpreter, which goes element by element through a combine function of the kernel's own."""

from __future__ import annotations

from typing import Any

import numpy as np

from topo_opt.runtime.interpreter_floats import bf16_to_f32, f32_to_bf16


def patch_reductions(ti: Any) -> None:
    """Reductions and scans with the kernel's own combine function: by halves, on whole slices at a time.

    Changes the classes of `triton.runtime.interpreter` (`ti`). The combine function is associative by contract, as on the GPU, where the order is also not defined.
    """
    import triton.language as tl

    def tensor(data: np.ndarray, like: Any) -> Any:
        kind = tl.block_type(like.dtype, list(data.shape)) if data.ndim else like.dtype
        return tl.core.tensor(
            ti.TensorHandle(data if data.ndim else data.reshape(1), like.dtype.scalar), kind
        )

    def combine(self: Any, inputs: Any, left: list[np.ndarray], right: list[np.ndarray]) -> list[np.ndarray]:
        both = [*map(tensor, left, inputs), *map(tensor, right, inputs)]
        result = self.combine_fn(*both)
        parts = result if isinstance(result, tuple) else (result,)
        return [
            np.broadcast_to(np.asarray(p.handle.data), left[0].shape).astype(x.dtype)
            for p, x in zip(parts, left)
        ]

    def generic_reduce(self: Any, input: Any) -> Any:
        whole = self.axis is None
        arrays = [
            np.asarray(t.handle.data).reshape(-1) if whole else np.asarray(t.handle.data) for t in input
        ]
        arrays = [np.moveaxis(a, 0 if whole else self.axis, 0) for a in arrays]
        while (length := arrays[0].shape[0]) > 1:
            half = length // 2
            odd = [a[2 * half :] for a in arrays]
            arrays = combine(self, input, [a[:half] for a in arrays], [a[half : 2 * half] for a in arrays])
            if length % 2:
                arrays = [np.concatenate([a, o]) for a, o in zip(arrays, odd)]
        out = []
        for a, t in zip(arrays, input):
            data = a[0]
            if self.keep_dims:
                data = data.reshape((1,) * len(t.shape)) if whole else np.expand_dims(data, self.axis)
            out.append(self.to_tensor(data, t.dtype))
        return out

    def generic_scan(self: Any, input: Any) -> Any:
        arrays = [np.moveaxis(np.asarray(t.handle.data), self.axis, 0).copy() for t in input]
        step, length = 1, arrays[0].shape[0]
        while step < length:
            # Blocks keep their power-of-two length: the first `step` results are combined and thrown away.
            shifted = [np.concatenate([a[:step], a[:-step]]) for a in arrays]
            later = combine(self, input, shifted, arrays)
            arrays = [np.concatenate([a[:step], b[step:]]) for a, b in zip(arrays, later)]
            step *= 2
        return [self.to_tensor(np.moveaxis(a, 0, self.axis), t.dtype) for a, t in zip(arrays, input)]

    def total(self: Any, input: Any) -> Any:
        data = input.handle.data
        if input.dtype.scalar == tl.bfloat16:
            wide = np.sum(bf16_to_f32(data), axis=self.axis, keepdims=self.keep_dims)
            return self.to_tensor(f32_to_bf16(wide), input.dtype)
        return self.to_tensor(
            np.sum(data, axis=self.axis, keepdims=self.keep_dims, dtype=data.dtype), input.dtype
        )

    ti.ReduceOps.generic_reduce, ti.ReduceOps.sum, ti.ScanOps.generic_scan = (
        generic_reduce,
        total,
        generic_scan,
    )
