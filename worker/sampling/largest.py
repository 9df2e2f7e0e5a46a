"""The largest elements of rows, ties to the lowest id."""

import torch
from torch import Tensor


def largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Finds the `count` largest elements of each row, in falling order; of equal ones the lowest ids, in rising order.

    Which of several -infs are among them is undefined.

    Args:
        values: [n, size], without NaN.
        count: 1 .. size.

    Returns:
        [n, count] each: the elements, and their ids, int64.
    """
    if count == values.shape[1]:
        ordered, ids = values.sort(dim=-1, descending=True, stable=True)
        return ordered, ids
    top, ids = values.topk(count + 1, dim=-1)
    smallest, next_smaller = top[:, count - 1], top[:, count]
    tied = ((smallest == next_smaller) & (smallest > float("-inf"))).nonzero().squeeze(1)
    ids = ids[:, :count].sort(dim=-1).values
    if tied.numel():
        ids[tied] = _ids_of_tied(values[tied], smallest[tied].unsqueeze(1), count)
    ordered, order = values.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return ordered, ids.gather(1, order)


def _ids_of_tied(values: Tensor, smallest: Tensor, count: int) -> Tensor:
    """[n, count]: ids of the elements above the smallest one and of the first that equal it, in rising order."""
    above, equal = values > smallest, values == smallest
    free = count - above.sum(-1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(-1) <= free))
    return chosen.nonzero()[:, 1].view(-1, count)


def rank_of(values: Tensor, ids: Tensor) -> Tensor:
    """[n], int64: the rank of the element `ids[i]` of row i, 1 = largest; of equal ones the lowest id is first.

    Args:
        values: [n, size].
        ids: [n], int64.
    """
    chosen = values.gather(1, ids.unsqueeze(1))
    every_id = torch.arange(values.shape[1], device=values.device)
    before = (values > chosen) | ((values == chosen) & (every_id < ids.unsqueeze(1)))
    return before.sum(-1) + 1
