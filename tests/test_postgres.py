"""One search on a real PostgreSQL: a worker that is killed, and a server that restarts in the middle."""

from __future__ import annotations

import contextlib
import gc
import os
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

import mptune
from mptune.errors import RunError
from mptune.tuning.dominance import hypervolume, pareto
from mptune.tuning.evaluation import ORIGIN_FP16, ORIGIN_FP32, Evaluation
from mptune.tuning.record import waits_told_to
from mptune.tuning.record.storage import check_opens, close_storage, open_storage
from tests.fakes import Diary
from tests.test_joining import Opener, check_two_hosts, evaluations_of, start_workers_with, until

pytest.importorskip("psycopg", reason="the driver psycopg is not installed")

# Connections that broke while the server was away, and processes that were killed, end with the garbage collector.
pytestmark = [
    pytest.mark.usefixtures("opened_here"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Collect here what would warn in some later test."""
    yield
    gc.collect()


BUDGET = 16
USER = "postgres"


class Server:
    """A PostgreSQL server of its own: on loopback, on a free port, in a temporary folder, as its own user."""

    def __init__(self, programs: Path, folder: Path) -> None:
        self._programs = programs
        self._folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"postgresql+psycopg://mptune@127.0.0.1:{self.port}/postgres"
        self._call("initdb", "--username=mptune", "--auth=trust", "--no-sync", "--pgdata", str(folder / "data"))
        self.start()

    def start(self) -> None:
        options = f"-p {self.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={self._folder} -c fsync=off"
        log = str(self._folder / "log")
        self._call("pg_ctl", "--pgdata", str(self._folder / "data"), "-w", "-l", log, "-o", options, "start")

    def stop(self) -> None:
        self._call("pg_ctl", "--pgdata", str(self._folder / "data"), "-w", "-m", "fast", "stop")

    def _call(self, program: str, *arguments: str) -> None:
        user = USER if os.getuid() == 0 else None  # the server refuses to run as root
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        subprocess.run([self._programs / program, *arguments], user=user, cwd=self._folder, check=True, **streams)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A running server; skips where PostgreSQL is not installed."""
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    initdb = shutil.which("initdb") or (installed[-1] if installed else None)
    if initdb is None:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    programs = Path(initdb).resolve().parent
    folder = Path(tempfile.mkdtemp(prefix="mptune-postgres-"))
    if os.getuid() == 0:
        shutil.chown(folder, USER)
    server = Server(programs, folder)
    try:
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder)


def quality(found: tuple[Evaluation, ...]) -> float:
    return hypervolume(pareto(found), next(e for e in found if e.origin == ORIGIN_FP32))


@pytest.mark.slow
def test_a_killed_worker_and_a_restarted_server_lose_nothing(
    server: Server, mlp_path: Path, mlp_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = {name: tmp_path / name for name in ("alone", "first", "second")}
    for folder in folders.values():
        folder.mkdir()
    single = tmp_path / "single.mptune"
    options = {"data": mlp_data, "confirm_rounds": 1, "knee": True}  # within a limit it ends before its budget
    mptune.search(mlp_path, out=single, budget=BUDGET, open_toolchain=Opener(folders["alone"], 0.0), **options)  # type: ignore[arg-type]
    alone = quality(evaluations_of(single))

    # The second one joins late. However slowly it starts, the first one leaves some of the budget to it.
    place, gate = tmp_path / "many.mptune", tmp_path / "the second one is dead"
    first, second = Opener(folders["first"], 0.2, gate=gate), Opener(folders["second"], 0.2)

    def begun(*openers: Opener) -> list[str]:
        return [plan for opener in openers for built in opener.built().values() for plan in built]

    def disturb() -> None:
        until(lambda: len(begun(first)) >= 2)
        code = f"""
from pathlib import Path
import mptune
from tests.test_joining import Opener
mptune.worker({str(place)!r}, storage={server.url!r}, open_toolchain=Opener(Path({str(folders["second"])!r}), 0.2))
"""
        joined = subprocess.Popen([sys.executable, "-c", code])
        until(lambda: len(begun(second)) >= 3)
        joined.send_signal(signal.SIGKILL)
        joined.wait()
        gate.touch()
        until(lambda: len(begun(first, second)) >= 9)
        server.stop()
        time.sleep(1.5)
        server.start()

    disturbing = threading.Thread(target=disturb)
    disturbing.start()
    diary = Diary()
    start_workers_with(first, monkeypatch)
    options |= {"storage": server.url, "gpus": (0,), "listener": diary, "open_toolchain": first}
    mptune.search(mlp_path, out=place, budget=BUDGET, **options)  # type: ignore[arg-type]
    disturbing.join()
    found = evaluations_of(place, server.url)
    plans = [e.plan.fingerprint for e in found]
    assert len(plans) == len(set(plans)) == BUDGET
    assert [sum(e.origin == origin for e in found) for origin in (ORIGIN_FP32, ORIGIN_FP16)] == [1, 1]
    assert len(begun(second)) >= 3
    repeated = len(begun(first, second)) - len(set(begun(first, second)))
    assert repeated <= 1, "only the plan that the killed worker had in work is built again"
    assert quality(found) >= 0.97 * alone
    assert not (place / "study.journal").exists()
    assert not [text for text in diary.warnings if "died" in text]


@pytest.mark.slow
def test_two_hosts_share_a_study_only_where_their_identity_is_equal(server: Server, tmp_path: Path) -> None:
    check_two_hosts(tmp_path, server.url)


Mode = Literal["pass", "slow", "reset", "refused"]

_RESET_AT_CLOSE = struct.pack("ii", 1, 0)
_SLOW_S = 0.003
"""Of each packet, either way; a plan of 20 groups takes about 150 transactions."""


class Proxy:
    """A TCP proxy to ``port`` of this host, which is slow, resets connections or refuses them."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._mode: Mode = "pass"
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def set(self, mode: Mode) -> None:
        """Apply a fault: ``reset`` to the open connections, ``slow`` and ``refused`` until ``pass``."""
        self._mode = mode
        if mode in ("reset", "refused"):
            self.end_all()

    def close(self) -> None:
        """End everything."""
        self._listener.close()
        self.end_all()

    def end_all(self) -> None:
        for pair in list(self._pairs):
            _end(*pair)

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
                self._pairs.append((client, server))
                threading.Thread(target=self._pass_on, args=(client, server), daemon=True).start()

    def _pass_on(self, client: socket.socket, server: socket.socket) -> None:
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
                    key.data.sendall(data)


def _end(*sockets: socket.socket) -> None:
    for each in sockets:
        with contextlib.suppress(OSError):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_AT_CLOSE)
            each.shutdown(socket.SHUT_RDWR)
        each.close()


def behind(proxy: Proxy, server: Server) -> str:
    """The URL of the server through the proxy."""
    return server.url.replace(f":{server.port}/", f":{proxy.port}/")


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    """A proxy in front of the server."""
    proxy = Proxy(server.port)
    yield proxy
    proxy.close()


def test_a_server_that_stays_away_is_one_clear_line(
    server: Server, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mptune.tuning.record.database.PATIENCE_S", 0.5)
    storage = open_storage(behind(proxy, server), tmp_path / "unused")
    proxy.set("refused")
    with pytest.raises(RunError, match="does not answer") as raised:
        storage.get_all_studies()
    assert "\n" not in raised.value.message
    close_storage(storage)


@pytest.mark.parametrize("mode", ["reset", "refused", "slow"])
def test_a_call_survives_a_fault_of_its_connection(server: Server, proxy: Proxy, mode: Mode, tmp_path: Path) -> None:
    waits: list[str] = []
    storage = open_storage(behind(proxy, server), tmp_path / "unused")
    before = len(storage.get_all_studies())

    def tell(text: str) -> None:
        waits.append(text)
        if mode == "refused":
            proxy.set("pass")

    proxy.set(mode)
    with waits_told_to(tell):
        assert len(storage.get_all_studies()) == before
    proxy.set("pass")
    close_storage(storage)
    assert len(waits) == (mode == "refused"), "the others are overcome by a new connection at once"


def test_opening_waits_for_a_starting_server(server: Server, proxy: Proxy, capfd: pytest.CaptureFixture[str]) -> None:
    waits: list[str] = []

    def tell(text: str) -> None:
        waits.append(text)
        proxy.set("pass")

    proxy.set("refused")
    with waits_told_to(tell):
        check_opens(behind(proxy, server))
    assert len(waits) == 1
    assert "waiting up to" in waits[0]
    assert capfd.readouterr().err == ""


def test_a_database_that_does_not_exist_is_an_error_at_once(server: Server) -> None:
    waits: list[str] = []
    with waits_told_to(waits.append), pytest.raises(RunError, match="does not exist"):
        check_opens(server.url.replace("/postgres", "/missing"))
    assert not waits
