"""A slow network between two processes of one machine: the second one runs in a network
namespace of its own, behind a virtual cable whose rate is limited.

This takes Linux, its `ip` and `tc`, and the right to use them (root). Where they are
missing the processes talk over loopback, which is as fast as memory.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
"""Names the network interface that gloo uses."""


class Link(NamedTuple):
    """How the second process is started, and how fast the network is."""

    command: list[str]
    """To put before the second process's own command."""
    rate: str
    """``"400 Mbit/s"``, or ``"loopback"``."""


@contextmanager
def slow_link(megabits: int) -> Iterator[Link]:
    """Limit both directions of the network of a second process to `megabits` per
    second.
    """
    name = f"ga{uuid.uuid4().hex[:8]}"
    before = os.environ.get(INTERFACE_VARIABLE)
    try:
        interfaces = _lay_cable(name, megabits)
    except (OSError, subprocess.CalledProcessError):
        _remove(name)
        yield Link([], "loopback")
        return
    os.environ[INTERFACE_VARIABLE] = interfaces[0]
    setting = f"{INTERFACE_VARIABLE}={interfaces[1]}"
    try:
        command = ["ip", "netns", "exec", name, "env", setting]
        yield Link(command, f"{megabits} Mbit/s")
    finally:
        if before is None:
            del os.environ[INTERFACE_VARIABLE]
        else:
            os.environ[INTERFACE_VARIABLE] = before
        _remove(name)


def _lay_cable(name: str, megabits: int) -> tuple[str, str]:
    """Make the namespace `name`, and a cable into it; return the names of its ends."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        raise FileNotFoundError("ip, tc")
    here = f"{name}a"
    there = f"{name}b"
    inside = ["ip", "netns", "exec", name]
    limit = ["root", "tbf", "rate", f"{megabits}mbit", "burst", "256kb"]
    limit += ["latency", "50ms"]
    _run("ip", "netns", "add", name)
    _run("ip", "link", "add", here, "type", "veth", "peer", "name", there)
    _run("ip", "link", "set", there, "netns", name)
    _run("ip", "address", "add", "10.213.7.1/30", "dev", here)
    _run(*inside, "ip", "address", "add", "10.213.7.2/30", "dev", there)
    _run("ip", "link", "set", here, "up")
    _run(*inside, "ip", "link", "set", there, "up")
    _run(*inside, "ip", "link", "set", "lo", "up")
    _run("tc", "qdisc", "add", "dev", here, *limit)
    _run(*inside, "tc", "qdisc", "add", "dev", there, *limit)
    return here, there


def _remove(name: str) -> None:
    # The cable goes with the namespace.
    with suppress(OSError, subprocess.CalledProcessError):
        _run("ip", "netns", "delete", name)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
