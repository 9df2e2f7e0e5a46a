"""Tensor parallelism: who a rank is, and the collectives of the layers. Every rank of the default process group takes part."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorParallel:
    """This process's rank among `size` ranks that share each layer."""

    rank: int = 0
    size: int = 1


def all_reduce(x: Tensor) -> Tensor:
    """Sums x over the ranks, in place."""
    dist.all_reduce(x)
    return x


def all_gather_columns(x: Tensor, columns: int, size: int) -> Tensor:
    """Puts the ranks' columns side by side.

    Args:
        x: [n, this rank's columns], ceil(columns / size) of them but for the last ranks, which may have fewer.
        columns: of all ranks together.
        size: number of ranks.

    Returns:
        [n, columns]
    """
    width = -(-columns // size)
    x = F.pad(x, (0, width - x.shape[1])).contiguous()
    shares = [torch.empty_like(x) for _ in range(size)]
    dist.all_gather(shares, x)
    return torch.cat(shares, dim=1)[:, :columns]
