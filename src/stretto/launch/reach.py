"""Other hosts, each reached by a command such as ssh, that do what they are told (:mod:`stretto.launch.far`)."""

from __future__ import annotations

import json
import os
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

from stretto.errors import LaunchError, UserError, one_line

SSH: Final = "ssh -o BatchMode=yes -o ConnectTimeout=10 {host}"
_ARRIVE_SECONDS: Final = 60.0  # until a host has answered at all: it imports from a disk that may be cold
_CLOSE_SECONDS: Final = 5.0


@dataclass(frozen=True)
class Place:
    """A host: the name by which it is reached, and the address at which other hosts find it."""

    name: str
    address: str

    @classmethod
    def parse(cls, text: str) -> tuple[Place, ...]:
        """``a,b`` or ``a=10.0.0.1,b=10.0.0.2``. Raises UserError for anything else."""
        found = []
        for piece in text.split(","):
            name, equals, address = (part.strip() for part in piece.partition("="))
            if not name or (equals and not address):
                raise UserError(f"--hosts {text}: expected NAME or NAME=ADDRESS, as in h0=10.0.0.1,h1=10.0.0.2")
            if name.startswith("-"):
                raise UserError(f"--hosts {text}: {name!r} would be taken for an option of what reaches it")
            found.append(cls(name, address or name))
        if len({one.name for one in found}) < len(found):
            raise UserError(f"--hosts {text}: a name stands there twice; give each host once")
        return tuple(found)


def command(reach: str, host: str, python: str) -> list[str]:
    """The words that start a host's end there.

    Args:
        reach: words with ``{host}`` among them.

    Raises:
        UserError: the words can't be split, or name no host.
    """
    try:
        words = shlex.split(reach)
    except ValueError as error:
        raise UserError(f"--reach {reach}: {one_line(error).lower()}; close what is quoted") from error
    if not any("{host}" in word for word in words):
        raise UserError(f"--reach {reach}: expected {{host}} where the host's name goes, as in '{SSH}'")
    far = [python, "-P", "-m", "stretto.launch.far"]
    if _by_ssh(words):  # a shell reads what ssh is given
        far = [shlex.join(far)]
    return [*(word.replace("{host}", host) for word in words), *far]


def _by_ssh(words: Sequence[str]) -> bool:
    return os.path.basename(words[0]) == "ssh"


class Far:
    """A host's end, seen from here."""

    def __init__(self, place: Place, reach: str = SSH, python: str = "") -> None:
        self.place = place
        words = command(reach, place.name, python or sys.executable)
        self._shown, self._buffer = shlex.join(words[: -1 if _by_ssh(words) else -4]), b""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed by close()
        try:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                start_new_session=True,  # a Ctrl-C here is this side's to handle
            )
        except OSError as error:
            self._errors.close()
            raise LaunchError(f"{place.name} can't be reached: {words[0]}: {error.strerror}") from error

    def fileno(self) -> int:
        """To wait on."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def ask(self, order: Mapping[str, Any]) -> None:
        """Sends an order; the answer comes by :func:`ask`."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the missing answer is told
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()

    def take(self) -> dict[str, Any] | None:
        """What has come; None where it isn't whole. Raises LaunchError where nothing comes any more."""
        data = os.read(self.fileno(), 1 << 16)
        if not data:
            raise LaunchError(self._gone())
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            with suppress(ValueError):  # what a login shell says
                if isinstance(found := json.loads(line), dict):
                    return found
        return None

    def _gone(self) -> str:
        self._process.wait(_CLOSE_SECONDS)
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        said = one_line(lines[-1]) if lines else f"it ended with status {self._process.returncode} and said nothing"
        hint = "stretto must be installed there for the Python that --python names"
        if self._process.returncode == 255:  # ssh's own end, not that of what it starts
            hint = "log in by hand first, or see --reach"
        return f"{self.place.name} can't be reached by `{self._shown}`: {said}; {hint}"

    def dismiss(self) -> None:
        """Closes its standard input, at which it ends by itself."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def close(self) -> None:
        """Ends it, there and here."""
        assert self._process.stdout is not None
        self.dismiss()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSE_SECONDS)
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()


class Hosts:
    """Several hosts, reached. Use it as a context manager, or close it: nothing is left on any of them then."""

    def __init__(self, places: Sequence[Place], reach: str = SSH, python: str = "") -> None:
        """Raises LaunchError, after it has closed all, where some of them can't be reached; it names each of those."""
        self._fars: list[Far] = []
        try:
            for place in places:
                self._fars.append(Far(place, reach, python))
            self._arrive()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def places(self) -> tuple[Place, ...]:
        """Which they are."""
        return tuple(far.place for far in self._fars)

    def ask(self, orders: Sequence[Mapping[str, Any]], seconds: float) -> list[Any]:
        """Each host's answer to its order; all work at the same time.

        Raises:
            LaunchError: one can't do it, isn't there any more, or takes longer than so many seconds.
        """
        for far, order in zip(self._fars, orders, strict=True):
            far.ask(order)
        return self._hear(seconds)

    def call(self, entry: str, payloads: Sequence[Any], seconds: float) -> list[Any]:
        """What the function ``module:function`` returns on each host for its payload."""
        return self.ask([{"call": entry, "payload": payload} for payload in payloads], seconds)

    def call_one(self, place: Place, entry: str, payload: Any, seconds: float) -> Any:
        """As :meth:`call`, of one host while the others rest."""
        (far,) = (far for far in self._fars if far.place == place)
        far.ask({"call": entry, "payload": payload})
        return self._hear(seconds, [far])[0]

    def _arrive(self) -> None:
        began, wrong = time.monotonic(), list[str]()
        for far in self._fars:  # all are on their way, and each has what is left of the time
            try:
                self._hear(_ARRIVE_SECONDS, [far], began)
            except LaunchError as error:
                wrong.append(str(error))
        if wrong:
            raise LaunchError("; ".join(wrong))

    def _hear(self, seconds: float, of: Sequence[Far] | None = None, began: float | None = None) -> list[Any]:
        fars = self._fars if of is None else of
        until, found = (time.monotonic() if began is None else began) + seconds, dict[str, Any]()
        while waiting := [far for far in fars if far.place.name not in found]:
            ready, _, _ = select.select(waiting, [], [], max(0.0, until - time.monotonic()))
            if not ready:
                names = ", ".join(far.place.name for far in waiting)
                raise LaunchError(f"{names}: no answer within {seconds:.0f} s; is the way there blocked?")
            for far in ready:
                if (answer := far.take()) is None:
                    continue
                if "error" in answer:
                    raise LaunchError(f"{far.place.name}: {answer['error']}")
                found[far.place.name] = answer["result"]
        return [found[far.place.name] for far in fars]

    def close(self) -> None:
        """Ends what was started on each."""
        for far in self._fars:
            far.dismiss()
        for far in self._fars:
            far.close()
        self._fars = []
