"""Two hosts that share nothing but a network: network namespaces of this machine, joined by a veth pair."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import slow
from ranks import ROOT

NAMES = tuple(f"fluxlike-{os.getpid()}-{which}" for which in "ab")  # another run's are left alone
ADDRESSES = ("10.213.77.1", "10.213.77.2")
PORT = 29477


def ip(*arguments: str) -> None:
    found = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20)
    if found.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {found.stderr.strip()}")


@contextlib.contextmanager
def hosts() -> Iterator[None]:
    """Both namespaces, each with its end of the cable as ``eth0``; skips where that is not allowed."""
    if shutil.which("ip") is None:
        pytest.skip("two hosts are made with iproute2, and there is no program ip here")
    try:
        for name in NAMES:
            ip("netns", "add", name)
        ip("link", "add", "eth0", "netns", NAMES[0], "type", "veth", "peer", "name", "eth0", "netns", NAMES[1])
        for name, address in zip(NAMES, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", name, "link", "set", device, "up")
    except OSError as error:
        remove()
        pytest.skip(f"this machine does not allow network namespaces: {error}")
    try:
        yield
    finally:
        remove()


def remove() -> None:
    for name in NAMES:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=20)


@contextlib.contextmanager
def launched(directory: Path, **env: str) -> Iterator[list[subprocess.Popen]]:
    """tests/nodes_case.py with two ranks on each host, by launch.sh; `said` reads what they say."""
    command = ["bash", "scripts/launch.sh", "--nnodes", "2", "--rdzv", f"{ADDRESSES[0]}:{PORT}", "--nproc", "2"]
    env = {**os.environ, "FLUXLIKE_PYTHON": sys.executable, "FLUXLIKE_TIMEOUT_S": "20", **env}
    env.pop("GLOO_SOCKET_IFNAME", None)  # launch.sh finds it
    running = []
    try:
        for name in NAMES:
            with open(directory / name, "w") as log:
                there = ["ip", "netns", "exec", name, *command, "tests/nodes_case.py"]
                running.append(subprocess.Popen(there, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT))
        yield running
    finally:
        for process in running:
            process.terminate()  # torchrun ends its ranks
        for process in running:
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(20)


def said(directory: Path) -> list[str]:
    return [line for name in NAMES for line in (directory / name).read_text().splitlines()]


@pytest.mark.slow(slow.ALWAYS)
def test_two_hosts(tmp_path):
    with hosts(), launched(tmp_path) as running:
        codes = [process.wait(240) for process in running]
    lines = said(tmp_path)
    assert codes == [0, 0], lines
    # anywhere in a line: warnings of torch, written in pieces, come between
    told = sorted(re.findall(r"rank (\d) of 4 on node (\d) of 2: check passed", "\n".join(lines)))
    assert told == [("0", "0"), ("1", "0"), ("2", "1"), ("3", "1")], lines


@pytest.mark.slow(slow.ALWAYS)
def test_a_host_that_dies(tmp_path):
    """A process of one host ends: what the ranks of the other are told. torchrun itself then waits for the host to come back."""
    with hosts(), launched(tmp_path, NODES_CASE_DIES="3"):
        since = time.monotonic()
        while time.monotonic() - since < 100:
            told = [line for line in said(tmp_path) if "was told" in line and "on node 1" in line]
            if told:
                break
            time.sleep(0.2)
    assert told and any(name in told[0] for name in ("rank 3 on node 1", "rank 2 on node 1")), said(tmp_path)
