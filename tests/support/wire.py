"""A TCP proxy between a client and a server, which delays, changes or drops what the client sends."""

import mmap
import os
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

Touch = Callable[[bytes], bytes | None]
"""What goes on in place of a chunk that came. None breaks the connection; nothing (`b""`) leaves it open and dead."""
BUCKET = b"load_bucket"
"""What a request to load a bucket has, and no other."""


@contextmanager
def proxied(url: str, touch: Touch) -> Iterator[str]:
    """The address of a proxy in front of the server at `url`."""
    target = urlsplit(url)

    class Connection(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with socket.create_connection((target.hostname, target.port)) as server:
                back = threading.Thread(target=self._pass_back, args=[server], daemon=True)
                back.start()
                while chunk := self.request.recv(1 << 20):
                    changed = touch(chunk)
                    if changed is None:
                        break
                    if not changed:
                        while self.request.recv(1 << 20):
                            pass
                    server.sendall(changed)
                server.shutdown(socket.SHUT_RDWR)
                self.request.shutdown(socket.SHUT_RDWR)
                back.join()

        def _pass_back(self, server: socket.socket) -> None:
            with suppress(OSError):  # of a side that has gone
                while chunk := server.recv(1 << 20):
                    self.request.sendall(chunk)
                self.request.shutdown(socket.SHUT_RDWR)

        def finish(self) -> None:
            self.request.close()

    class Proxy(socketserver.ThreadingTCPServer):
        daemon_threads = True

        def handle_error(self, request: object, client: object) -> None:
            """A side that goes away is what the proxy is for."""

    with Proxy(("127.0.0.1", 0), Connection) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{proxy.server_address[1]}"
        finally:
            proxy.shutdown()


def cut_between_buckets(times: int = 1) -> Touch:
    """Break the connection at the second bucket of a sync, so often."""
    seen = 0

    def touch(chunk: bytes) -> bytes | None:
        nonlocal seen
        seen += BUCKET in chunk
        return None if BUCKET in chunk and seen % 2 == 0 and seen <= 2 * times else chunk

    return touch


def swallowed(times: int = 1) -> Touch:
    """Lose the first bucket of a sync without a word, so often: both ends wait."""
    return _so_often(times, BUCKET, lambda chunk: b"")


def delayed(seconds: float) -> Touch:
    def touch(chunk: bytes) -> bytes:
        time.sleep(seconds)
        return chunk

    return touch


def flipped_in_memory(trainer: int, times: int = 1) -> Touch:
    """Flip a bit of each bucket that the process `trainer` shares, just before an engine reads it; so often."""

    def change(chunk: bytes) -> bytes:
        files = Path(f"/proc/{trainer}/fd").iterdir()
        buckets = {(held.st_dev, held.st_ino): file for file in files if _is_bucket(file) and (held := file.stat())}
        assert buckets
        for path in buckets.values():
            flip(path, 1000)
        return chunk

    return _so_often(times, BUCKET, change)


def _is_bucket(file: Path) -> bool:
    with suppress(OSError):  # closed meanwhile
        return os.readlink(file).startswith("/memfd:bucket")
    return False


def flipped_on_disk(folder: Path, times: int = 1) -> Touch:
    """Flip a bit of the weights in `folder`, just before an engine reads them; so often."""

    def change(chunk: bytes) -> bytes:
        (weights,) = folder.glob("*.safetensors")
        flip(weights)
        return chunk

    return _so_often(times, b"POST /update_weights_from_disk", change)


def flipped_in_message(times: int = 1) -> Touch:
    """Flip a bit of the text that says where a tensor lies in a bucket, the last digit of its offset; so often."""

    def change(chunk: bytes) -> bytes:
        place = chunk.index(b"], [", chunk.index(b"tensors")) - 1
        return chunk[:place] + bytes([chunk[place] ^ 1]) + chunk[place + 1 :]

    return _so_often(times, BUCKET, change)


def _so_often(times: int, part: bytes, change: Touch) -> Touch:
    """Do `change` to the first chunks that have this part."""
    left = times

    def touch(chunk: bytes) -> bytes | None:
        nonlocal left
        if not left or part not in chunk:
            return chunk
        left -= 1
        return change(chunk)

    return touch


def flip(file: Path, position: int | None = None) -> None:
    """Flip a bit of a file, in its middle unless said otherwise."""
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as content:
        content[len(content) // 2 if position is None else position] ^= 1
