"""Which sizes are captured: the ladders, the keys made of them, and what they leave out."""

from dataclasses import dataclass

from modelworker.graphs.settings import GraphSettings, RuntimeMode
from modelworker.graphs.shapes import GraphKey, make_key

# Above it a step is long enough for its launches not to matter.
_LARGEST_DEFAULT_MIXED_SIZE = 512


def default_sizes(end: int, exact_up_to: int = 0) -> tuple[int, ...]:
    """Returns 1, 2, 4, then every 8 up to 256, then every 16, and `end`: the numbers of tokens up to `end`, ascending.

    Args:
        end: the last one.
        exact_up_to: up to which there is every number.
    """
    steps = {*range(1, exact_up_to + 1), 1, 2, 4, *range(8, 257, 8), *range(272, end, 16)}
    return (*sorted(size for size in steps if size < end), end)


def full_sizes(settings: GraphSettings, query_len: int) -> tuple[int, ...]:
    """Returns the numbers of tokens of the FULL graphs of a decode query length, ascending.

    Each is a multiple of the query length. By default the last is the largest batch that the limits allow.
    """
    end = settings.largest_decode_batch(query_len)
    sizes = settings.decode_sizes or default_sizes(end, settings.exact_up_to * query_len)
    return tuple(sorted({min(-(-size // query_len) * query_len, end) for size in sizes}))


def mixed_sizes(settings: GraphSettings) -> tuple[int, ...]:
    """Returns the numbers of tokens of the graphs of any mix, ascending.

    By default they end at twice the largest decode batch or at 512 tokens, with the largest decode batch itself among them.
    """
    if settings.mixed_sizes is not None:
        return tuple(sorted(settings.mixed_sizes))
    largest_decode = settings.max_sequences * max(settings.decode_query_lens)
    end = min(2 * largest_decode, _LARGEST_DEFAULT_MIXED_SIZE)
    sizes = (*default_sizes(end, settings.exact_up_to), largest_decode)
    return tuple(sorted({min(size, settings.max_tokens_per_step) for size in sizes}))


def graph_keys(settings: GraphSettings) -> tuple[GraphKey, ...]:
    """Returns what is captured, in the order of capture.

    PIECEWISE first, then FULL, each from the largest down: the first take the most memory, in which all others then fit.
    """
    keys = []
    if settings.mode.decode_mode is RuntimeMode.FULL:
        keys += [
            make_key(RuntimeMode.FULL, size, max_sequences=settings.max_sequences, uniform_query_len=query_len)
            for query_len in settings.decode_query_lens
            for size in full_sizes(settings, query_len)
        ]
    if settings.mode.mixed_mode is not RuntimeMode.NONE:
        keys += [make_key(settings.mode.mixed_mode, size, max_sequences=settings.max_sequences) for size in mixed_sizes(settings)]
    return tuple(sorted(keys, key=_capture_order))


def _capture_order(key: GraphKey) -> tuple[int, ...]:
    return (key.mode, -key.num_tokens, -(key.num_sequences or 0), key.uniform_query_len or 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """Batches that the limits allow and that are larger than every graph of their kind.

    Attributes:
        uniform_query_len: of a decode batch; None: of any mix.
        largest_captured: tokens of the largest graph of the kind.
        largest_allowed: tokens of the largest batch of the kind.
        is_chosen: whether sizes that the settings name leave them out; the default ones end where launches cost little.
    """

    uniform_query_len: int | None
    largest_captured: int
    largest_allowed: int
    is_chosen: bool

    def __str__(self) -> str:
        kind = "mixed batches" if self.uniform_query_len is None else f"decode batches of query length {self.uniform_query_len}"
        return f"{kind} of {self.largest_captured + 1} .. {self.largest_allowed} tokens have no graph of their kind"


def gaps(settings: GraphSettings) -> tuple[Gap, ...]:
    """Returns which of the largest batches are not captured, of those kinds of batches that have graphs at all."""
    found = []
    if settings.mode.decode_mode is RuntimeMode.FULL:
        for query_len in settings.decode_query_lens:
            ends = full_sizes(settings, query_len)[-1], settings.largest_decode_batch(query_len)
            is_chosen = settings.decode_sizes is not None
            found.append(Gap(uniform_query_len=query_len, largest_captured=ends[0], largest_allowed=ends[1], is_chosen=is_chosen))
    if settings.mode.mixed_mode is not RuntimeMode.NONE:
        ends = mixed_sizes(settings)[-1], settings.max_tokens_per_step
        is_chosen = settings.mixed_sizes is not None
        found.append(Gap(uniform_query_len=None, largest_captured=ends[0], largest_allowed=ends[1], is_chosen=is_chosen))
    return tuple(gap for gap in found if gap.largest_captured < gap.largest_allowed)
