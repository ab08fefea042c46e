"""Shards in an S3 server (moto's), over a wire that is cut."""

from __future__ import annotations

import random
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from lightning_ring.data import Remote, ShardDataset
from lightning_ring.data.packing import run
from lightning_ring.data.packing.settings import PackSettings
from lightning_ring.errors import ShardError, StoreError
from tests.data.photos import image_folder

pytestmark = pytest.mark.ranks  # takes seconds


class CuttingProxy:
    """Passes connections on to ``port``; while it is `cutting`, each one ends after a random number of bytes."""

    def __init__(self, port: int, seed: int = 0) -> None:
        self._target = port
        self._draw = random.Random(seed)
        self.cutting = False
        self.cuts = 0
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._socket.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                for pair in ((client, server, False), (server, client, True)):
                    threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        with suppress(OSError):
            while data := source.recv(8192):
                if answers and self.cutting and self._draw.random() < 0.15:
                    self.cuts += 1
                    sink.sendall(data[: self._draw.randrange(len(data))])
                    if self.cuts % 2:  # a reset in the place of an end
                        sink.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    break
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


@contextmanager
def s3_server() -> Iterator[int]:
    moto = pytest.importorskip("moto.server", reason="moto is not installed (extra `test`)")
    pytest.importorskip("s3fs", reason="s3fs is not installed (extra `remote`)")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        yield server.get_host_and_port()[1]
    finally:
        server.stop()


def test_a_bucket_is_read_whatever_the_wire_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = image_folder(tmp_path / "src", classes=2, images=50)
    run.pack(source, tmp_path / "dst", PackSettings(size=40, shard_mb=60 / 1024), 2, lambda *numbers: None)
    local = ShardDataset(tmp_path / "dst", decode=False)
    order = random.Random(0).sample(range(len(local)), 60)
    expected = local.read_many(order)
    with s3_server() as port:
        import s3fs

        access: dict[str, Any] = {"key": "name", "secret": "word"}
        bucket = s3fs.S3FileSystem(endpoint_url=f"http://127.0.0.1:{port}", **access)
        bucket.mkdir("bucket")
        bucket.put(f"{tmp_path / 'dst'}/", "bucket/photos", recursive=True)
        proxy = CuttingProxy(port)
        through = {"endpoint_url": f"http://127.0.0.1:{proxy.port}", **access}
        small = 200 * 1024 / 2**30  # GiB: single samples are fetched

        def opened(url: str = "s3://bucket/photos", **options: Any) -> ShardDataset:
            settings = {"cache": tmp_path / "cache", "cache_gb": small, "storage_options": through, "deadline": 60.0}
            return ShardDataset(url, decode=False, remote=Remote(**(settings | options)))

        dataset = opened()
        assert dataset.fingerprint == local.fingerprint
        proxy.cutting = True
        assert dataset.read_many(order) == expected
        assert proxy.cuts > 5
        proxy.cutting = False

        with pytest.raises(ShardError, match=r"s3://bucket/other/manifest.json cannot be read: it is not there"):
            opened("s3://bucket/other")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_SESSION_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
            monkeypatch.setenv(name, str(tmp_path / "nothing"))
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        with pytest.raises(StoreError, match=r"s3://bucket/photos/manifest.json cannot be read: access is denied"):
            opened(storage_options={"endpoint_url": through["endpoint_url"]})
        bucket.rm("bucket/photos/shard-000001.tar")
        with pytest.raises(ShardError, match=r"s3://bucket/photos/shard-000001.tar cannot be read: it is not there"):
            opened(cache=tmp_path / "another")
        proxy.close()
    with pytest.raises(StoreError, match=r"s3://bucket/photos/manifest.json could not be read in 3 s, with"):
        opened(deadline=3.0)
