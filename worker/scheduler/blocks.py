"""The KV cache blocks of a worker: which are free, and how many holders each of the others has."""

from collections import Counter, deque
from collections.abc import Iterable

from modelworker.worker.scheduler.types import BlockOrder


class BlockPool:
    """Hands out blocks. Block 0, the null block, is never given out."""

    def __init__(self, num_blocks: int, order: BlockOrder = "ascending") -> None:
        ids = list(range(1, num_blocks))
        if order == "reversed":
            ids.reverse()
        elif order == "interleaved":
            ids = ids[::2] + ids[1::2]
        self.num_usable = len(ids)
        self._free = deque(ids)
        self._num_holders = Counter[int]()

    @property
    def num_free(self) -> int:
        """Blocks that can be given out now."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Gives out `count` blocks to one holder; the caller has checked that there are as many."""
        block_ids = [self._free.popleft() for _ in range(count)]
        self.share(block_ids)
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Adds a holder to each block."""
        self._num_holders.update(block_ids)

    def give_back(self, block_ids: Iterable[int]) -> None:
        """Takes a holder from each block; one without holders is free."""
        for block_id in block_ids:
            self._num_holders[block_id] -= 1
            if self._num_holders[block_id] == 0:
                del self._num_holders[block_id]
                self._free.append(block_id)
