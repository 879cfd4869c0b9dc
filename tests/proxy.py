"""A TCP proxy in front of a server that goes silent, is slow, resets connections or refuses them."""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
import time
from typing import Literal

Mode = Literal["pass", "silent", "slow", "reset", "refused"]

_RESET_AT_CLOSE = struct.pack("ii", 1, 0)
_SLOW_S = 0.003
"""Of each packet, either way; a plan of 20 groups takes about 150 transactions."""


class Proxy:
    """Passes connections on to ``port`` of this host."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._mode: Mode = "pass"
        self._pairs: list[tuple[socket.socket, socket.socket, threading.Event]] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def set(self, mode: Mode) -> None:
        """Apply a fault: ``silent`` and ``reset`` to the open connections, ``slow`` and ``refused`` until ``pass``."""
        self._mode = mode
        for client, server, is_silent in list(self._pairs):
            if mode == "silent":
                is_silent.set()
            elif mode in ("reset", "refused"):
                _end(client, server)

    def close(self) -> None:
        """End everything."""
        self._listener.close()
        for client, server, _ in self._pairs:
            _end(client, server)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    if self._mode == "refused":
                        raise ConnectionRefusedError
                    server = socket.create_connection(("127.0.0.1", self._target))
                except OSError:
                    _end(client)
                    continue
                pair = client, server, threading.Event()
                self._pairs.append(pair)
                threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, client: socket.socket, server: socket.socket, is_silent: threading.Event) -> None:
        with contextlib.suppress(OSError, ValueError), selectors.DefaultSelector() as selector:
            selector.register(client, selectors.EVENT_READ, server)
            selector.register(server, selectors.EVENT_READ, client)
            while True:
                for key, _ in selector.select(0.2):
                    assert isinstance(key.fileobj, socket.socket)
                    data = key.fileobj.recv(1 << 16)
                    if not data:
                        _end(client, server)
                        return
                    if self._mode == "slow":
                        time.sleep(_SLOW_S)
                    if not is_silent.is_set():
                        key.data.sendall(data)


def _end(*sockets: socket.socket) -> None:
    for each in sockets:
        with contextlib.suppress(OSError):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_AT_CLOSE)
            each.shutdown(socket.SHUT_RDWR)
        each.close()
