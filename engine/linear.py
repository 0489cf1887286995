"""Matrix products with constant weights, packed once for the CPU's kernels where the library has any."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

#: rows that the packed layout is tuned for: a small verification batch
_TYPICAL_ROWS = 32


def linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Callable[[torch.Tensor], torch.Tensor]:
    """x [n, in] -> x W^T + b [n, out], for weight [out, in].

    On a CPU, fp32 and bf16 weights are reordered once for oneDNN (about twice as fast as plain products at
    few rows, and never slower in our measurements); other dtypes and devices use the plain product.
    """
    if weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16) and _packs():
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _TYPICAL_ROWS)
        product = torch.ops.mkldnn._linear_pointwise

        def run(x: torch.Tensor) -> torch.Tensor:
            return product(x, packed, bias, "none", [], "")  # type: ignore[no-any-return]

        return run
    return lambda x: F.linear(x, weight, bias)


def wide_linear(weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """x [n, in] -> x W^T [n, out] in at least fp32.

    On a GPU sums of 16-bit products stay as they were made: rounded, the largest logits of a row would often
    be equal. Where torch cannot do that, and on CPUs, the product is rounded to the weight's type first.
    """
    if weight.is_cuda and weight.dtype in (torch.bfloat16, torch.float16) and _keeps_sums(weight):
        return lambda x: torch.mm(x, weight.T, out_dtype=torch.float32)
    product = linear(weight)

    def run(x: torch.Tensor) -> torch.Tensor:
        out = product(x)
        return out if out.dtype == torch.float64 else out.float()

    return run


def _keeps_sums(weight: torch.Tensor) -> bool:
    square = weight.new_zeros(16, 16)
    try:
        torch.mm(square, square, out_dtype=torch.float32)
    except (TypeError, RuntimeError):
        return False
    return True


def _packs() -> bool:
    """Whether this build of torch offers the packed product (an operator without a stability promise)."""
    ops = torch.ops.mkldnn
    return (
        torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(ops, "_reorder_linear_weight")
        and hasattr(ops, "_linear_pointwise")
    )
