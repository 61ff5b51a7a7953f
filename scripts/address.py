"""address.py HOST: the address of this machine towards HOST, and 1 if it is HOST itself, else 0."""

import socket
import sys

with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
    probe.connect((sys.argv[1], 9))  # sends nothing
    here = probe.getsockname()[0]
print(here, int(here == socket.gethostbyname(sys.argv[1])))
