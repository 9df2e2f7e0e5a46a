"""The address that a worker listens on."""

import socket

from modelworker.worker.errors import SetupError


def check_address(host: str, port: int) -> str:
    """Checks that the address can be listened on, and returns it as gRPC spells it.

    A plain socket says why it can't be bound; gRPC does not, and writes its own lines to stderr.

    Raises:
        SetupError: it can't be opened.
    """
    bare_host = host.removeprefix("[").removesuffix("]")
    try:
        found = socket.getaddrinfo(bare_host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise SetupError(f"can't listen on host {host} port {port}: {error.strerror or error}") from error
    except UnicodeError as error:
        raise SetupError(f"can't listen on host {host!r}: it is no host name") from error
    return f"[{bare_host}]:{port}" if ":" in bare_host else f"{bare_host}:{port}"
