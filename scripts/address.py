"""address.py HOST: this machine's address towards HOST, 1 if it is HOST itself, else 0, and the interface with that address.

The other hosts are told that address, so it is none that leads back to whoever asks: a machine often knows its own name by such a
one (127.0.1.1 on Debian). Then it is that of GLOO_SOCKET_IFNAME, if set, else of the default route.
"""

import contextlib
import fcntl
import os
import socket
import struct
import sys

SIOCGIFADDR = 0x8915
REMEDY = "give an address of that host which all hosts reach"


def is_loopback(address: str) -> bool:
    return address.startswith("127.")


def towards(address: str) -> str:
    """By which address this machine would send there. OSError if there is no way."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing
        return probe.getsockname()[0]


def of_interface(name: str) -> str:
    """The IPv4 address of an interface. OSError if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return socket.inet_ntoa(fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))[20:24])


def interface_of(address: str) -> str:
    """The interface with this address, or nothing."""
    for _, name in socket.if_nameindex():
        with contextlib.suppress(OSError):
            if of_interface(name) == address:
                return name
    return ""


def find(host: str, interface: str) -> tuple[str, bool]:
    """The address of this machine, and whether it is the host. ``interface``: its own, if it is known. OSError, ValueError."""
    if is_loopback(host) or host.lower().rstrip(".").split(".")[0] == "localhost":
        raise ValueError(f"{host} is another host for each that asks")
    known = [found[4][0] for found in socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_DGRAM)]
    outside = [address for address in known if not is_loopback(address)]
    if outside:
        here = towards(outside[0])
        return here, here in outside
    here = of_interface(interface) if interface else towards("192.0.2.1")  # which is nobody's, so by the default route
    if is_loopback(here):
        raise ValueError(f"this host knows {host} by {known[0]} only, and {interface or 'its default route'} has {here}")
    return here, True


if __name__ == "__main__":
    try:
        here, is_host = find(sys.argv[1], os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0])
    except (OSError, ValueError) as error:
        sys.exit(f"launch.sh: --rdzv {sys.argv[1]}: no address by which this host and that one reach each other: {error}; {REMEDY}")
    print(here, int(is_host), interface_of(here))
