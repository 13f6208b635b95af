"""fp32 matrix products on CPUs for which torch's own choice of library runs at half speed.

torch hands fp32 products on x86 to MKL, which leaves AVX-512 unused where the CPU is not Intel's. oneDNN, also part of
torch, uses it: twice the speed on a Zen 5 (`benchmarks/README.md`). torch has no setting that chooses oneDNN for fp32
without rounding to bf16, so two operators get another CPU kernel. Results differ in the order of summation alone.
"""

import functools
import logging
import platform
import re
import warnings
from pathlib import Path

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_LEAST_ROWS, _LEAST_PRODUCTS = 8, 2**20
"""Smaller products are left to MKL: there the call itself is what costs."""
_library: torch.library.Library | None = None


def use_fast_matmul() -> bool:
    """Route large fp32 ``mm`` and ``addmm`` on this CPU to oneDNN if it is one that gains; says whether it is.

    For the whole process, gradients included; calling it again changes nothing.
    """
    global _library
    if _library is None and gains_from_onednn():
        _library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="(?s).*[Oo]verriding a previously registered kernel", category=UserWarning
            )
            _library.impl("mm", _mm, "CPU")
            _library.impl("addmm", _addmm, "CPU")
        logger.info("fp32 matrix products run on oneDNN: faster than MKL on this CPU")
    return _library is not None


@functools.cache
def gains_from_onednn() -> bool:
    """Whether this is an x86 CPU with AVX-512 that is not Intel's, and torch has both libraries."""
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()):
        return False
    described = Path("/proc/cpuinfo")
    if platform.machine() != "x86_64" or not described.exists():
        return False
    text = described.read_text()
    vendor = re.search(r"^vendor_id\s*:\s*(\S+)", text, re.MULTILINE)
    return vendor is not None and vendor.group(1) != "GenuineIntel" and " avx512f" in text


def onednn_product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """(M, K) times (K, N), plus a bias (N,): fp32, any strides."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(left, right.t(), bias, "none", [], "")
    return product


def _is_large(left: Tensor, right: Tensor) -> bool:
    rows, inner = left.shape
    return (
        left.dtype == right.dtype == torch.float32
        and rows >= _LEAST_ROWS
        and rows * inner * right.shape[1] >= _LEAST_PRODUCTS
        and left.layout == right.layout == torch.strided
    )


def _mm(left: Tensor, right: Tensor) -> Tensor:
    if _is_large(left, right) and _inner_sizes_agree(left, right):
        return onednn_product(left, right)
    return torch.ops.aten.mm.out(left, right, out=left.new_empty(0))


def _addmm(bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    plain = beta == alpha == 1 and bias.shape == right.shape[1:] and bias.dtype == left.dtype and bias.is_contiguous()
    if plain and _is_large(left, right) and _inner_sizes_agree(left, right):
        return onednn_product(left, right, bias)
    return torch.ops.aten.addmm.out(bias, left, right, beta=beta, alpha=alpha, out=left.new_empty(0))


def _inner_sizes_agree(left: Tensor, right: Tensor) -> bool:
    """If not, torch's own kernel says so in its usual words."""
    return left.dim() == right.dim() == 2 and left.shape[1] == right.shape[0]
