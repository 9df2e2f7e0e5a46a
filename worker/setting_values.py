"""What a setting's text may say: one parser per kind of value, for flags and environment variables alike."""

from modelworker.worker.errors import SettingsError

MAX_TABLE_SIZE = 2**20
"""Entries of a table that a worker keeps."""

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_bytes(text: str) -> int:
    """Parses a size such as 1073741824, 512M, 512MiB or 1.5G (binary units).

    Raises:
        SettingsError: the text is not a positive size.
    """
    number = text.strip().upper().removesuffix("IB").removesuffix("B")
    unit = number[-1:] if number[-1:] in "KMGT" else ""
    try:
        size = int(float(number.removesuffix(unit)) * _UNITS[unit])
    except (ValueError, OverflowError):
        size = 0
    if size <= 0:
        raise SettingsError(f"{text!r} is not a size: expected something like 512M or 1.5G")
    return size


def integer_within(text: str, first: int, last: int, what: str = "an integer") -> int:
    """Parses an integer of first .. last.

    Raises:
        SettingsError: the text is not one; it is said to be no `what`.
    """
    if not text.strip().isdecimal() or not first <= int(text) <= last:
        raise SettingsError(f"{text!r} is not {what} of {first} .. {last}")
    return int(text)


def positive_int(text: str) -> int:
    """Parses an integer of 1 .. 2^30, so that twice of it still fits into a field of 32 bits.

    Raises:
        SettingsError: the text is not one.
    """
    return integer_within(text, 1, 2**30)


def non_negative_int(text: str) -> int:
    """Parses an integer of 0 .. 2^30.

    Raises:
        SettingsError: the text is not one.
    """
    return integer_within(text, 0, 2**30)


def table_size(text: str) -> int:
    """Parses a number of entries of a table, 1 .. `MAX_TABLE_SIZE`.

    Raises:
        SettingsError: the text is not one.
    """
    return integer_within(text, 1, MAX_TABLE_SIZE, "a number of entries")


def num_threads(text: str) -> int:
    """Parses a number of threads, 1 .. 1024.

    Raises:
        SettingsError: the text is not one.
    """
    return integer_within(text, 1, 1024, "a number of threads")


def message_bytes(text: str) -> int:
    """Parses a size of a gRPC message: below 2 GiB.

    Raises:
        SettingsError: the text is not one.
    """
    size = parse_bytes(text)
    if size >= 2**31:
        raise SettingsError(f"{text!r} is too large: a gRPC message has less than 2G")
    return size


def positive_float(text: str) -> float:
    """Parses a number above 0 and at most 1e9.

    Raises:
        SettingsError: the text is not one.
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value <= 1e9:
        raise SettingsError(f"{text!r} is not a number above 0 and at most 1e9")
    return value


def comma_separated(text: str) -> tuple[str, ...]:
    """Parses words between commas."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def positive_ints(text: str) -> tuple[int, ...]:
    """Parses positive integers between commas.

    Raises:
        SettingsError: one of them is not.
    """
    return tuple(positive_int(word) for word in comma_separated(text))


def optimization_level(text: str) -> int:
    """Parses 0, 1, 2 or 3.

    Raises:
        SettingsError: the text is none of them.
    """
    if text.strip() not in ("0", "1", "2", "3"):
        raise SettingsError(f"{text!r} is not an optimization level: expected 0, 1, 2 or 3")
    return int(text)


def fraction(text: str) -> float:
    """Parses a number in (0, 1].

    Raises:
        SettingsError: the text is not one.
    """
    value = positive_float(text)
    if value > 1.0:
        raise SettingsError(f"{text!r} is above 1")
    return value


def port_number(text: str) -> int:
    """Parses a TCP port; 0 lets the system choose.

    Raises:
        SettingsError: the text is not one.
    """
    return integer_within(text, 0, 65535, "a port")
