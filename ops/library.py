"""Direct registration of ops with torch.

`torch.library.custom_op` wraps every call in Python that handles cases which do not arise here, at a measurable cost per call; an
op defined and bound on a `Library` goes straight from the dispatcher to its implementation.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.compiler.config

# Module-level state by design: an op lives as long as the library that defined it.
LIBRARY: Final = torch.library.Library("modelworker", "FRAGMENT")
# Of the forms that are Triton kernels.
TRITON_LIBRARY: Final = torch.library.Library("modelworker_triton", "FRAGMENT")

# The plain PyTorch implementations run wherever torch does.
PLATFORM_KEYS: Final = ("CPU", "CUDA")


def register_op(
    implementation: Callable[..., Any],
    *,
    mutates_args: Sequence[str] = (),
    fake: Callable[..., Any] | None = None,
    name: str | None = None,
    dispatch_keys: Sequence[str] = PLATFORM_KEYS,
    tags: Sequence[torch.Tag] = (),
    library: torch.library.Library = LIBRARY,
) -> None:
    """Registers a function as an op of the library's namespace.

    Args:
        implementation: annotated function; its signature is the op's schema.
        mutates_args: exactly the arguments that it writes to. The compiler reorders or drops what it is not told.
        fake: allocates outputs like the implementation's, without computing; needed when the op returns something.
        name: the op's name; default: the function's.
        dispatch_keys: the platforms that the implementation runs on.
        tags: torch's tags of the op.
        library: where the op is defined; another one lets a plug-in own a namespace.
    """
    op_name = name or implementation.__name__
    schema = torch.library.infer_schema(implementation, mutates_args=tuple(mutates_args))
    library.define(op_name + schema, tags=tuple(tags))
    for dispatch_key in dispatch_keys:
        library.impl(op_name, implementation, dispatch_key=dispatch_key)
    _tag_compiled_code(f"{library.ns}::{op_name}{schema}")
    torch.library.register_fake(f"{library.ns}::{op_name}", fake or _returns_nothing, lib=library)


def register_form(
    implementation: Callable[..., Any], *, name: str, library: torch.library.Library, dispatch_keys: Sequence[str] = PLATFORM_KEYS
) -> None:
    """Registers another form of an op of ours, in a library of its own: with the same schema, mutations and fake.

    Args:
        implementation: takes the op's arguments.
        name: of the op.
        library: where the form is defined.
        dispatch_keys: the platforms that it runs on.
    """
    op = getattr(getattr(torch.ops, LIBRARY.ns), name).default
    schema = str(op._schema).removeprefix(f"{LIBRARY.ns}::{name}")
    library.define(name + schema)
    for dispatch_key in dispatch_keys:
        library.impl(name, implementation, dispatch_key=dispatch_key)
    _tag_compiled_code(f"{library.ns}::{name}{schema}")
    torch.library.register_fake(f"{library.ns}::{name}", op, lib=library)


def _tag_compiled_code(schema: str) -> None:
    """Makes a schema part of the key of torch's caches of compiled code.

    They know an op by its name alone: code that was compiled when it wrote to nothing would be used again, unnoticed, after it has
    become one that writes to its arguments.
    """
    tag = hashlib.sha256(f"{torch.compiler.config.cache_key_tag} {schema}".encode()).hexdigest()
    torch.compiler.config.cache_key_tag = tag


def _returns_nothing(*_args: Any, **_kwargs: Any) -> None:
    """The fake of an op that only mutates its arguments."""
