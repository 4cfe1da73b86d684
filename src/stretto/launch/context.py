"""Where a worker finds itself: who it is, who else there is, and who started it."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any

from stretto.elastic.epoch import MembershipEpoch
from stretto.errors import LaunchError, nearest
from stretto.launch.control import Control, NoControl
from stretto.launch.interface import interface_to
from stretto.watch import Position

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_current: ContextVar[WorkerContext | None] = ContextVar("stretto_worker", default=None)


@dataclass
class WorkerContext:
    """What a worker's entry is given.

    Args:
        member: this worker's id, for the whole job.
        epoch: who takes part.
        prepared: what the job's ``prepare`` returned on this host, shared with the other workers.
        control: the line to the launcher.
        imports_rss_bytes: resident memory after the imports, before anything was built.
        local_rank: place among the workers of this host.
        coordinates: place on the mesh, such as ``dp=1``; the entry sets it, and failures carry it.
    """

    member: str
    epoch: MembershipEpoch
    prepared: Any = None
    control: Control = field(default_factory=NoControl)
    imports_rss_bytes: int = 0
    local_rank: int = 0
    coordinates: str = ""
    # Where it is in its work, for whoever looks for hangs.
    position: Position = field(default_factory=Position, init=False)
    hang_after: float = field(default=0.0, init=False)  # seconds; 0 where nobody looks for hangs
    store_server: object = None  # kept alive with the context, where this process hosts the store

    @property
    def rank(self) -> int:
        """This member's rank in its epoch."""
        return self.epoch.rank_of(self.member)

    @property
    def world_size(self) -> int:
        """How many members the epoch has."""
        return len(self.epoch.members)


def current() -> WorkerContext | None:
    """The context of the worker that this code runs in, or None in any other process."""
    return _current.get()


def enter(context: WorkerContext) -> None:
    """Makes ``context`` the current one, for the rest of this process."""
    _current.set(context)


def attach() -> WorkerContext:
    """The current context; else one made from the variables of torchrun or of Slurm's srun; else a lone worker's.

    Where nobody hosts the store (srun; torchrun without its agent's store), rank 0 does. The context made is the
    current one from then on.

    Raises:
        LaunchError: the variables contradict each other or are not whole, or name an interface that isn't there.
    """
    context = current()
    if context is None:
        check_interface()
        environment = os.environ
        if "RANK" in environment and "WORLD_SIZE" in environment:
            context = _from_torchrun(environment)
        elif "SLURM_PROCID" in environment and "SLURM_NTASKS" in environment:
            context = _from_slurm(environment)
        else:
            context = WorkerContext("m1", MembershipEpoch(1, ("m1",), "", 1))
            stay_on_loopback()
        enter(context)
    return context


def _from_torchrun(environment: Mapping[str, str]) -> WorkerContext:
    restarts = _number(environment, "TORCHELASTIC_RESTART_COUNT", 0)
    context = _started_by_other(
        "torchrun",
        rank=_number(environment, "RANK"),
        world_size=_number(environment, "WORLD_SIZE"),
        local_rank=_number(environment, "LOCAL_RANK", 0),
        address=_text(environment, "MASTER_ADDR"),
        port=_number(environment, "MASTER_PORT"),
        number=1 + restarts,
    )
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        _host_store(context)
    return context


def _from_slurm(environment: Mapping[str, str]) -> WorkerContext:
    job = _number(environment, "SLURM_JOB_ID", 0)
    context = _started_by_other(
        "srun",
        rank=_number(environment, "SLURM_PROCID"),
        # Of this step, where Slurm says it: a job may have more tasks than one srun starts.
        world_size=_number(environment, "SLURM_STEP_NUM_TASKS", _number(environment, "SLURM_NTASKS")),
        local_rank=_number(environment, "SLURM_LOCALID", 0),
        address=environment.get("MASTER_ADDR") or first_host(_text(environment, "SLURM_JOB_NODELIST")),
        port=_number(environment, "MASTER_PORT", 20000 + job % 20000),
        number=1,
    )
    _host_store(context)
    return context


def _started_by_other(
    starter: str, *, rank: int, world_size: int, local_rank: int, address: str, port: int, number: int
) -> WorkerContext:
    if not 0 <= rank < world_size:
        raise LaunchError(f"{starter} says rank {rank} of {world_size}: expected a rank from 0 to {world_size - 1}")
    if address in _LOOPBACK:
        stay_on_loopback()
    else:
        _talk_towards(address)
    members = tuple(f"m{place + 1}" for place in range(world_size))
    epoch = MembershipEpoch(number, members, f"tcp://{address}:{port}", number)
    return WorkerContext(members[rank], epoch, local_rank=local_rank)


def stay_on_loopback() -> None:
    """Gloo listens on the host's outer address unless told; a job of one host has no use for that."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _talk_towards(address: str) -> None:
    """Gloo takes the address that this host's own name has here, by which others often can't reach it (Debian's is
    127.0.1.1); the interface that leads to rank 0 is one by which they can. Where that isn't known, Gloo chooses."""
    with suppress(LaunchError):
        name, own = interface_to(address)
        if not ip_address(own).is_loopback:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def check_interface() -> None:
    """Raises LaunchError where Gloo is told to use an interface that this machine does not have."""
    named, available = os.environ.get("GLOO_SOCKET_IFNAME", ""), [name for _, name in socket.if_nameindex()]
    for name in filter(None, named.split(",")):
        if name not in available:
            there = ", ".join(available)
            raise LaunchError(
                f"GLOO_SOCKET_IFNAME: no interface {name!r}{nearest(name, available)}; available: {there}"
            )


def _host_store(context: WorkerContext) -> None:
    if context.rank == 0 and context.world_size > 1:
        import torch.distributed as dist

        host, _, port = context.epoch.store.removeprefix("tcp://").rpartition(":")
        try:
            # Torch would listen on every interface; we hand it a socket that is bound to this address alone.
            listening = socket.create_server((host, int(port)))
            context.store_server = dist.TCPStore(  # type: ignore[attr-defined]
                host, int(port), is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
            )
        except (OSError, RuntimeError) as error:
            raise LaunchError(
                f"rank 0 cannot host the store at {host}:{port} ({str(error).splitlines()[0]}); "
                "choose a free port with MASTER_PORT"
            ) from error


def first_host(nodes: str) -> str:
    """The first host of Slurm's short form: ``n[3-5,9],m1`` begins with ``n3``."""
    match = re.match(r"([^,\[]*)(?:\[([^,\-\]]+))?", nodes)
    first = "".join(part or "" for part in match.groups()) if match else ""
    if not first:
        raise LaunchError(f"SLURM_JOB_NODELIST is {nodes!r}: expected at least one host; or set MASTER_ADDR")
    return first


def _text(environment: Mapping[str, str], name: str) -> str:
    value = environment.get(name, "")
    if not value:
        raise LaunchError(f"{name} is not set, though the other variables say that this is one worker of several")
    return value


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    if default is not None and not environment.get(name):
        return default
    value = _text(environment, name)
    if not value.isdecimal():
        raise LaunchError(f"{name} is {value!r}: expected a number, 0 or more")
    return int(value)
