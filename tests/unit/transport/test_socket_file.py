"""The listening socket's path, permissions, leftovers of a crash, and races between two starts."""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from encoder_service.errors import ConfigurationError
from encoder_service.rpc.server import remove_dead_socket
from encoder_service.transport import socket_file
from encoder_service.transport.socket_file import ListeningSocket
from tests.unit.transport.broker_rig import num_descriptors, socket_folder


@pytest.fixture
def folder() -> Iterator[Path]:
    before = num_descriptors()
    with socket_folder() as path:
        yield path
    assert num_descriptors() == before


def refusal(path: object) -> str:
    with pytest.raises(ConfigurationError) as refused:
        ListeningSocket(str(path))
    return refused.value.message


@pytest.mark.parametrize("mode", [0o660, 0o600, 0o666])
def test_permissions_do_not_depend_on_the_umask(folder: Path, mode: int) -> None:
    previous = os.umask(0o077)
    try:
        listener = ListeningSocket(str(folder / "s"), mode=mode)
    finally:
        os.umask(previous)
    assert stat.S_IMODE(os.stat(folder / "s").st_mode) == mode
    assert listener.is_in_place()
    listener.close()
    assert not (folder / "s").exists()
    assert not listener.is_in_place()


def test_the_group_is_set(folder: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root gives files to other groups")
    listener = ListeningSocket(str(folder / "s"), gid=12345)
    assert os.stat(folder / "s").st_gid == 12345
    listener.close()


def test_the_socket_of_a_dead_broker_is_replaced(folder: Path) -> None:
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(folder / "s"))
    dead.listen()
    dead.close()
    assert (folder / "s").exists()
    listener = ListeningSocket(str(folder / "s"))
    client = socket.socket(socket.AF_UNIX)
    client.connect(str(folder / "s"))
    client.close()
    listener.close()


def test_p21_the_socket_of_a_dying_broker_is_waited_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed process listens on until it has ended."""
    monkeypatch.setattr(socket_file, "DYING_S", 30.0)
    path = str(folder / "s")
    dying = socket.socket(socket.AF_UNIX)
    dying.bind(path)
    dying.listen(1)
    gone = threading.Timer(0.3, dying.close)
    gone.start()
    listener = ListeningSocket(path)
    assert not gone.is_alive() or dying.fileno() == -1
    gone.join()
    client = socket.socket(socket.AF_UNIX)
    client.connect(path)
    client.close()
    listener.close()


def test_p21_and_so_is_that_of_a_dying_service(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_file, "DYING_S", 0.2)
    path = folder / "s"
    with socket.socket(socket.AF_UNIX) as living:
        living.bind(str(path))
        living.listen(1)
        with pytest.raises(ConfigurationError, match="another process listens"):
            remove_dead_socket(path)
        assert path.exists()
        monkeypatch.setattr(socket_file, "DYING_S", 30.0)
        gone = threading.Timer(0.3, living.close)
        gone.start()
        remove_dead_socket(path)
        assert not path.exists()
        gone.join()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_file, "DYING_S", 0.1)


@pytest.mark.usefixtures("impatient")
def test_a_live_socket_is_left_alone_and_named(folder: Path) -> None:
    first = ListeningSocket(str(folder / "s"))
    message = refusal(folder / "s")
    assert str(folder / "s") in message
    assert "another process listens" in message
    assert first.is_in_place()
    first.close()


@pytest.mark.usefixtures("impatient")
def test_a_live_socket_with_a_full_queue_is_live(folder: Path) -> None:
    first = ListeningSocket(str(folder / "s"), backlog=1)
    clients = []
    for _ in range(50):
        client = socket.socket(socket.AF_UNIX)
        client.setblocking(False)
        clients.append(client)
        try:
            client.connect(str(folder / "s"))
        except BlockingIOError:
            break
    else:
        pytest.fail("the queue never filled")
    assert "another process listens" in refusal(folder / "s")
    for client in clients:
        client.close()
    first.close()


def test_a_file_that_is_no_socket_is_left_alone(folder: Path) -> None:
    (folder / "s").write_text("precious")
    assert "no socket" in refusal(folder / "s")
    assert (folder / "s").read_text() == "precious"


def test_a_close_does_not_remove_a_successors_socket(folder: Path) -> None:
    first = ListeningSocket(str(folder / "s"))
    (folder / "s").unlink()
    second = ListeningSocket(str(folder / "s"))
    assert not first.is_in_place()
    first.close()
    assert second.is_in_place()
    second.close()
    second.close()


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("\0abstract", "abstract"),
        ("@abstract", "abstract"),
        ("relative/s", "absolute"),
        ("/nowhere/at/all/s", "/nowhere/at/all does not exist"),
        ("/tmp/" + "x" * 200, "205 bytes, a unix socket's has at most 107"),
        ("/tmp/a\0b", "zero byte"),
    ],
)
def test_paths_no_other_container_could_use_are_refused(path: str, words: str) -> None:
    assert words in refusal(path)


def test_the_longest_path_works_and_one_byte_more_does_not(folder: Path) -> None:
    room = socket_file.MAX_PATH_BYTES - len(str(folder)) - 1
    ListeningSocket(str(folder / ("s" * room))).close()
    assert "108 bytes" in refusal(folder / ("s" * (room + 1)))


def test_a_folder_that_cannot_be_written_is_an_error_with_the_path(folder: Path) -> None:
    (folder / "file").write_text("")
    assert str(folder / "file") in refusal(folder / "file" / "s")


def start_at_once(path: str, num_starts: int) -> tuple[list[ListeningSocket], list[ConfigurationError]]:
    """Those that listen, and the errors of those that do not."""
    won: list[ListeningSocket] = []
    lost: list[ConfigurationError] = []
    barrier = threading.Barrier(num_starts)

    def start() -> None:
        barrier.wait()
        try:
            won.append(ListeningSocket(path))
        except ConfigurationError as error:
            lost.append(error)

    threads = [threading.Thread(target=start) for _ in range(num_starts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return won, lost


@pytest.mark.usefixtures("impatient")
def test_of_many_starts_at_once_after_a_crash_exactly_one_wins(folder: Path) -> None:
    path = str(folder / "s")
    for _ in range(20):
        dead = socket.socket(socket.AF_UNIX)
        dead.bind(path)
        dead.close()
        won, lost = start_at_once(path, 4)
        assert (len(won), len(lost)) == (1, 3)
        assert won[0].is_in_place()
        won[0].close()


def test_whoever_holds_the_folders_lock_delays_a_start_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    monkeypatch.setattr(socket_file, "LOCK_WAIT_S", 0.05)
    held = os.open(folder, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    ListeningSocket(str(folder / "s")).close()
    os.close(held)
