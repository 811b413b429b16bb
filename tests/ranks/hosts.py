"""Hosts that a test makes of this machine: namespaces of Linux, joined by cables that can be pulled out.

A host has a name, network interfaces, ``lo`` among them, and mounts of its own; processes, cores and, but for what a
test mounts, files are those of the machine.  It lasts as long as its keeper, a process inside it that waits for orders
on its standard input.  When that ends, by :meth:`Host.close` or with the test's process, the keeper kills whatever runs
in the host, and the system takes the namespaces and their cables away: there is nothing outside them to be cleaned up,
and no name in which two tests could clash.

Run as a program this file is the keeper, what enters a host, and what Open MPI is to call in place of ssh.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

NAMESPACES = {"mnt": 0x00020000, "uts": 0x04000000, "net": 0x40000000}  # by their names in /proc, CLONE_NEW… of each
SSH_KEEPS = {"HOME", "LANG", "LOGNAME", "PATH", "SHELL", "USER"}  # nothing else of the environment arrives, as by ssh
SECONDS = 10.0  # that a keeper has to end

# Of linux/rtnetlink.h, if_link.h and veth.h.
NEWLINK, REQUEST_CREATE_AND_ANSWER = 16, 0x605
IFNAME, LINKINFO, NET_NS_PID, INFO_KIND, INFO_DATA, VETH_PEER = 3, 18, 19, 1, 2, 1
# Of linux/sockios.h and if.h.
GET_FLAGS, SET_FLAGS, SET_ADDRESS, SET_MASK, IS_UP = 0x8913, 0x8914, 0x8916, 0x891C, 1
ADD_BRIDGE, ADD_PORT, BRIDGE = 0x89A0, 0x89A2, b"bridge"
# Of linux/mount.h.
MS_REC, MS_PRIVATE = 0x4000, 0x40000


class Host:
    """One host.

    Arguments:
        name: what its programs take for the machine's name.

    Attributes:
        pid: that of its keeper.

    Raises:
        OSError: the system makes no namespaces, or not for this user.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        command = [sys.executable, "-S", __file__, "keep", name]
        # In a session of its own: Ctrl-C is for the tests, which then close their hosts.
        self._keeper = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self.pid = self._keeper.pid
        try:
            self._listen()
        except BaseException:
            self.close()
            raise

    def connect(self, interface: str, address: str, switch: Switch) -> None:
        """Have an interface with an IPv4 address, in a network of 256, and lay a cable from it to a switch."""
        self._order("cable", interface, str(switch.pid), switch.port(self))
        self._order("address", interface, address)
        self._order("up", interface)
        switch.join(self)

    def mount(self, folder: Path) -> None:
        """Have a folder be an empty disk of this host's own."""
        self._order("mount", str(folder))

    def command(self, *command: str) -> list[str]:
        """A command that runs in this host."""
        return [sys.executable, "-S", __file__, "enter", str(self.pid), *command]

    def close(self) -> None:
        """End all that runs in it, and then the host."""
        for stream in (self._keeper.stdin, self._keeper.stdout):
            if stream is not None:
                stream.close()
        try:
            self._keeper.wait(SECONDS)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()

    def _order(self, *words: str) -> None:
        assert self._keeper.stdin is not None
        print(*words, sep="\t", file=self._keeper.stdin, flush=True)
        self._listen()

    def _listen(self) -> None:
        assert self._keeper.stdout is not None
        answer = self._keeper.stdout.readline().strip()
        if answer != "done":
            raise OSError(f"host {self.name}: {answer or 'its keeper has ended'}")


class Switch(Host):
    """What joins hosts to a network: a host itself, which hands packets on and runs nothing."""

    def __init__(self) -> None:
        super().__init__("switch")
        try:
            self._order("bridge")
        except BaseException:
            self.close()
            raise

    def port(self, host: Host) -> str:
        """The name of the interface where a host's cable ends."""
        return f"port{host.pid}"

    def join(self, host: Host) -> None:
        """Join a cable to the network, which has been laid."""
        self._order("port", self.port(host))
        self.plug(host)

    def unplug(self, host: Host) -> None:
        """Pull the host's cable out: packets are lost from now on, and no connection is told."""
        self._order("down", self.port(host))

    def plug(self, host: Host) -> None:
        """Put it back."""
        self._order("up", self.port(host))


def in_place_of_ssh(*hosts: Host) -> str:
    """A command that mpirun may call in place of ssh."""
    keepers = [word for host in hosts for word in (host.name, str(host.pid))]  # mpirun would cut words at = and :
    return " ".join([sys.executable, "-S", __file__, "ssh", *keepers, "--"])


def _keep(name: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        _check(libc.unshare(sum(NAMESPACES.values())))
        # What is mounted here is not to be seen outside.
        _check(libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None))
        socket.sethostname(name)
        _set_up("lo", True)
    except OSError as error:
        print(error, flush=True)
        return
    print("done", flush=True)
    for line in sys.stdin:
        order, *words = line.rstrip("\n").split("\t")
        try:
            if order == "cable":
                _lay_cable(words[0], int(words[1]), words[2])
            elif order == "address":
                _set_address(*words)
            elif order in ("up", "down"):
                _set_up(words[0], order == "up")
            elif order == "bridge":
                _control(ADD_BRIDGE, BRIDGE)
                _set_up(BRIDGE.decode(), True)
            elif order == "port":
                _control(ADD_PORT, struct.pack("=16si20x", BRIDGE, socket.if_nametoindex(words[0])))
            elif order == "mount":
                _check(libc.mount(b"tmpfs", os.fsencode(words[0]), b"tmpfs", 0, b"size=16m"))
            print("done", flush=True)
        except OSError as error:
            print(error, flush=True)
    _kill_all()


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _kill_all() -> None:
    """Kill all processes of this network namespace but this one, until no more are found."""
    own, is_alone = os.readlink("/proc/self/ns/net"), False
    while not is_alone:
        time.sleep(0.01)
        is_alone = True
        for pid in (int(entry) for entry in os.listdir("/proc") if entry.isdigit()):
            with contextlib.suppress(OSError):  # it has just ended, or has as good as ended
                if pid != os.getpid() and os.readlink(f"/proc/{pid}/ns/net") == own:
                    os.kill(pid, signal.SIGKILL)
                    is_alone = False


def _lay_cable(interface: str, other: int, its_interface: str) -> None:
    """Make a pair of interfaces, one here and one in the host of another keeper."""

    def attribute(kind: int, data: bytes) -> bytes:
        return struct.pack("=HH", 4 + len(data), kind) + data + bytes(-len(data) % 4)

    def named(name: str) -> bytes:
        return bytes(16) + attribute(IFNAME, name.encode() + b"\0")

    peer = named(its_interface) + attribute(NET_NS_PID, struct.pack("=I", other))
    kind = attribute(INFO_KIND, b"veth") + attribute(INFO_DATA, attribute(VETH_PEER, peer))
    body = named(interface) + attribute(LINKINFO, kind)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as kernel:
        kernel.send(struct.pack("=IHHII", 16 + len(body), NEWLINK, REQUEST_CREATE_AND_ANSWER, 1, 0) + body)
        number = -struct.unpack_from("=i", kernel.recv(4096), 16)[0]
    if number:
        raise OSError(number, os.strerror(number))


def _set_address(interface: str, address: str) -> None:
    for request, value in ((SET_ADDRESS, address), (SET_MASK, "255.255.255.0")):
        _control(request, struct.pack("=16sHH4s8x", interface.encode(), socket.AF_INET, 0, socket.inet_aton(value)))


def _set_up(interface: str, is_up: bool) -> None:
    answer = _control(GET_FLAGS, struct.pack("=16sH14x", interface.encode(), 0))
    flags = struct.unpack_from("=H", answer, 16)[0]
    flags = flags | IS_UP if is_up else flags & ~IS_UP
    _control(SET_FLAGS, struct.pack("=16sH14x", interface.encode(), flags))


def _control(request: int, interface: bytes) -> bytes:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        return fcntl.ioctl(any_socket, request, interface)


def _enter(pid: str, command: list[str]) -> None:
    """Go into the host of a keeper, and become a command."""
    libc, folder = ctypes.CDLL(None, use_errno=True), os.getcwd()
    opened = [os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY) for name in NAMESPACES]
    for descriptor, kind in zip(opened, NAMESPACES.values(), strict=True):
        _check(libc.setns(descriptor, kind))
        os.close(descriptor)
    os.chdir(folder)  # mounts of another host have begun at their root
    os.execvp(command[0], command)


if __name__ == "__main__":
    task, *arguments = sys.argv[1:]
    if task == "keep":
        _keep(*arguments)
    elif task == "enter":
        _enter(arguments[0], arguments[1:])
    elif task == "ssh":
        # Hosts with their keepers, then what ssh would get: a host, and words that are a line for its shell.
        end = arguments.index("--")
        keepers = dict(zip(arguments[:end:2], arguments[1:end:2], strict=True))
        host, *words = arguments[end + 1 :]
        for name in os.environ.keys() - SSH_KEEPS:
            del os.environ[name]
        _enter(keepers[host], ["/bin/sh", "-c", " ".join(words)])
