"""Which of this host's network interfaces leads to an address."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from stretto.errors import LaunchError

_SIOCGIFADDR: Final = 0x8915
_DISCARD: Final = 9  # a port; nothing is sent to it


def interface_to(address: str) -> tuple[str, str]:
    """The interface by which packets to ``address`` leave, and this host's own address on it.

    Raises:
        LaunchError: the name isn't found, there is no way to it, or no interface begins with that own address, so that
            Gloo can't be told to use it.
    """
    try:
        family, kind, _, _, place = socket.getaddrinfo(address, _DISCARD, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as one:
            one.connect(place)  # of datagrams this sends nothing: the kernel only looks for the way
            own = one.getsockname()[0]
    except socket.gaierror as error:
        raise LaunchError(f"{address} isn't found ({error.strerror})") from error
    except OSError as error:
        raise LaunchError(f"there is no way to {address} ({error.strerror})") from error
    for _, name in socket.if_nameindex():
        if own in _addresses(name):
            return name, own
    raise LaunchError(f"packets to {address} leave from {own}, which isn't the first address of any interface")


def named_interface() -> str:
    """The one that the user has named for Gloo; empty where none is."""
    return os.environ.get("GLOO_SOCKET_IFNAME", "")


def _addresses(name: str) -> Iterator[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        try:
            found = fcntl.ioctl(one.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            yield socket.inet_ntoa(found[20:24])
        except OSError:
            pass  # it has none of that family
    try:
        lines = Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()
    except OSError:
        return
    for number, *_, of in map(str.split, lines):
        if of == name:
            yield str(ip_address(bytes.fromhex(number)))
