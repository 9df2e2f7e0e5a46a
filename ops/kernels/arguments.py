"""What kernels are told of their tensors."""

from typing import NamedTuple

from torch import Tensor


class Rows(NamedTuple):
    """Where the rows of a tensor lie: row r starts at (r // num_inner) * outer_stride + (r % num_inner) * inner_stride.

    Attributes:
        num_rows: of all.
        size: of a row, whose elements lie side by side.
        num_inner: rows of the second to last dimension; 1 where there are two dimensions.
        outer_stride: elements from one group of rows to the next.
        inner_stride: elements from one row of a group to the next.
    """

    num_rows: int
    size: int
    num_inner: int
    outer_stride: int
    inner_stride: int


def rows_of(tensor: Tensor) -> Rows:
    """Describes a tensor of up to three dimensions.

    Raises:
        ValueError: the elements of a row don't lie side by side, or there are more dimensions.
    """
    check_dense("x", tensor)
    if tensor.ndim == 3:
        outer, inner, size = tensor.shape
        return Rows(outer * inner, size, inner, tensor.stride(0), tensor.stride(1))
    if tensor.ndim == 2:
        return Rows(tensor.shape[0], tensor.shape[1], 1, tensor.stride(0), 0)
    raise ValueError(f"x: expected two or three dimensions, found {tensor.ndim}")


def check_dense(name: str, tensor: Tensor) -> None:
    """Refuses a tensor whose last dimension isn't dense.

    Raises:
        ValueError: it isn't.
    """
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name}: expected elements of the last dimension side by side, found a stride of {tensor.stride(-1)}")


def check_same_layout(key_cache: Tensor, value_cache: Tensor) -> None:
    """Refuses caches of keys and values that are laid out differently: kernels compute one place for both.

    Raises:
        ValueError: they are.
    """
    if key_cache.shape != value_cache.shape or key_cache.stride() != value_cache.stride():
        raise ValueError(
            f"value_cache: expected the layout of key_cache, {list(key_cache.shape)} with strides {key_cache.stride()}, "
            f"found {list(value_cache.shape)} with strides {value_cache.stride()}"
        )
