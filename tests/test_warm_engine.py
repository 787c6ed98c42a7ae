"""Ends of engines that tests fork from a template are heard of, however they are told."""

from __future__ import annotations

import socket
from pathlib import Path

from tests.support.warm_engine import Template


def test_two_ends_that_are_told_as_one_are_both_heard(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        template = Template(str(tmp_path / "socket"))
        with listener.accept()[0] as told:
            told.sendall(b'["ended", 1, -9]\n["ended", 2, 0]\n["en')
            assert (template.status_of(1), template.status_of(2), template.status_of(3)) == (-9, 0, None)
            told.sendall(b'ded", 3, 1]\n')
            assert template.status_of(3) == 1
