"""A client of PyTorch's TCPStore without PyTorch, made from rendezvous/PROTOCOL.md."""

import os
import socket
import struct


class TorchClient:
    def __init__(self, host=None, port=None):
        address = (host or os.environ["MASTER_ADDR"], int(port or os.environ["MASTER_PORT"]))
        self.socket = socket.create_connection(address, timeout=60)
        self.socket.sendall(struct.pack("<BI", 0, 0x3C85F7CE))

    def say(self, op, *texts, tail=b""):
        self.socket.sendall(bytes([op]) + b"".join(struct.pack("<Q", len(text)) + text for text in texts) + tail)

    def hear(self, size):
        heard = b""
        while len(heard) < size:
            piece = self.socket.recv(size - len(heard))
            if not piece:
                raise ConnectionError("closed by the server")
            heard += piece
        return heard

    def number(self):
        return struct.unpack("<q", self.hear(8))[0]

    def set(self, key, value):
        self.say(1, key, value)

    def get(self, key):
        self.say(3, key)
        return self.hear(self.number())

    def add(self, key, delta):
        self.say(4, key, tail=struct.pack("<q", delta))
        return self.number()

    def wait(self, *keys):
        self.socket.sendall(bytes([6]) + struct.pack("<Q", len(keys)) + b"".join(struct.pack("<Q", len(key)) + key for key in keys))
        assert self.hear(1) == b"\0"

    def count_keys(self):
        self.say(7)
        return self.number()
