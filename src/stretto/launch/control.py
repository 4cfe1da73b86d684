"""A worker's line to whoever started it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, Protocol

from stretto.comm.framed import Channel

_Callback = Callable[[], None]


class Control(Protocol):
    """What a worker can say to, and hear from, its launcher."""

    def send(self, event: dict[str, Any]) -> None:
        """Tells the launcher of an event; JSON."""
        ...

    def stop_requested(self) -> bool:
        """Whether the job shall end at the next safe point."""
        ...

    def on_break(self, callback: _Callback) -> _Callback:
        """Calls ``callback`` from a watching thread when the epoch is over, even while this thread sleeps inside a
        collective; at once where it is over already. Returns a function that takes the callback back."""
        ...


class NoControl:
    """The control of a process that nobody of ours has started: nobody asks it to stop, and of its events it says
    itself, on standard error, what a person must know."""

    def send(self, event: dict[str, Any]) -> None:
        """Prints notes, and where the run is once it has ended."""
        if event["kind"] == "note":
            print(f"stretto: {event['text']}", file=sys.stderr, flush=True)
        elif event["kind"] == "summary":
            told = f"{event['steps']:,} steps, last loss {event['final_loss']}; everything is in {event['run']}"
            print(f"stretto: {told}", file=sys.stderr, flush=True)

    def stop_requested(self) -> bool:
        """Never."""
        return False

    def on_break(self, callback: _Callback) -> _Callback:
        """Nobody will call it."""
        return lambda: None


class ChannelControl:
    """The control of a worker of ours. A thread watches the channel from :meth:`watch` on."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._broken = False
        self._callbacks: list[_Callback] = []
        self._where: Callable[[], dict[str, Any]] | None = None

    def watch(self, where: Callable[[], dict[str, Any]] | None = None) -> None:
        """Starts the watching thread. It answers the launcher's question where this worker is by ``where``."""
        self._where = where
        threading.Thread(target=self._watch, name="stretto-control", daemon=True).start()

    def send(self, event: dict[str, Any]) -> None:
        """Sends an event. Raises TypeError where JSON can't hold it."""
        self._channel.send({"kind": "event", "event": event})

    def stop_requested(self) -> bool:
        """Whether the launcher has asked us to end."""
        return self._stop.is_set()

    def on_break(self, callback: _Callback) -> _Callback:
        """Keeps the callback for a break, or calls it now if one has come."""
        with self._lock:
            if not self._broken:
                self._callbacks.append(callback)
                return lambda: self._take_back(callback)
        callback()
        return lambda: None

    def _take_back(self, callback: _Callback) -> None:
        with self._lock:
            if callback in self._callbacks:
                self._callbacks.remove(callback)

    def _watch(self) -> None:
        while (message := self._channel.receive()) is not None:
            if message["kind"] == "stop":
                self._stop.set()
            elif message["kind"] == "break":
                self._break()
            elif message["kind"] == "where" and self._where is not None:
                self._answer(self._where)
        os._exit(128 + signal.SIGHUP)  # nobody is left to work for

    def _answer(self, where: Callable[[], dict[str, Any]]) -> None:
        try:
            self._channel.send({"kind": "stands", **where()})
        except Exception:  # a question that finds no answer must not end the worker
            traceback.print_exc(file=sys.stderr)

    def _break(self) -> None:
        with self._lock:
            self._broken = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback()
            except Exception:  # one that fails must not keep the others from being called
                traceback.print_exc(file=sys.stderr)
