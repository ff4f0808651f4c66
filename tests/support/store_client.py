"""A client of a job's store, written from rendezvous/PROTOCOL.md alone: it holds the document to its word.

usage: store_client.py ADDRESS JOB_ID TOKEN GENERATION (unix:PATH, tcp:HOST:PORT or tls:HOST:PORT), or without arguments as a worker (its
environment tells them)
"""
import hashlib
import hmac
import json
import os
import secrets
import socket
import ssl
import struct
import sys

HELLO, CHALLENGE, PROOF, WELCOME, FAILURE = range(1, 6)
SET, GET, TRY_GET, ADD, COMPARE_SET, ERASE, WAIT, BARRIER = range(16, 24)
DONE, VALUE, ABSENT, SUM, EXCHANGED, ERASED = range(32, 38)


class Refused(Exception):
    def __init__(self, failure):
        super().__init__(failure["what"])
        self.code = failure["code"]


def connect(address):
    way, _, where = address.partition(":")
    if way == "unix":
        stream = socket.socket(socket.AF_UNIX)
        stream.settimeout(20)
        stream.connect(where)
        return stream
    host, _, port = where.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), timeout=20)


class StoreClient:
    def __init__(self, address, job_id, token, generation, role="worker", name="store_client.py"):
        self.socket, binding = connect(address), []
        if address.startswith("tls:"):
            settings = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            settings.check_hostname, settings.verify_mode = False, ssl.CERT_NONE
            self.socket = settings.wrap_socket(self.socket)
            binding = [hashlib.sha256(self.socket.getpeercert(binary_form=True)).hexdigest()]
        self.generation, self.requests = generation, 0
        nonce = secrets.token_hex(16)
        self.send(HELLO, 0, {"role": role, "name": name, "job_id": job_id, "nonce": nonce})
        kind, _, challenge, _ = self.receive()
        if kind == FAILURE:
            raise Refused(challenge)

        def mac(label):
            parts = [label, role, nonce, challenge["nonce"], job_id, name, *binding]
            text = b"".join(b"%d:%s" % (len(part.encode()), part.encode()) for part in parts)
            return hmac.new(token.encode(), text, hashlib.sha256).hexdigest()

        self.send(PROOF, 0, {"mac": mac("ddprun rendezvous 1 client")})
        kind, _, welcome, _ = self.receive()
        if kind == FAILURE:
            raise Refused(welcome)
        assert kind == WELCOME and hmac.compare_digest(welcome["mac"], mac("ddprun rendezvous 1 server"))

    def send(self, kind, request, fields, blob=b""):
        text = json.dumps(fields).encode()
        self.socket.sendall(b"DDPR" + struct.pack(">BBHIII", 1, kind, 0, request, len(text), len(blob)) + text + blob)

    def read(self, count):
        data = b""
        while len(data) < count:
            more = self.socket.recv(count - len(data))
            if not more:
                raise ConnectionError("the server closed the connection")
            data += more
        return data

    def receive(self):
        magic, major, kind, zero, request, json_bytes, blob_bytes = struct.unpack(">4sBBHIII", self.read(20))
        assert (magic, major, zero) == (b"DDPR", 1, 0)
        return kind, request, json.loads(self.read(json_bytes) or b"{}"), self.read(blob_bytes)

    def ask(self, kind, blob=b"", **fields):
        self.requests += 1
        self.send(kind, self.requests, dict(fields, generation=self.generation), blob)
        answer, request, said, value = self.receive()
        assert request == self.requests, "another request's answer"
        if answer == FAILURE:
            raise Refused(said)
        return answer, said, value


def refusal(call, *arguments, **fields):
    try:
        call(*arguments, **fields)
    except Refused as refused:
        return refused.code
    return "not refused"


def try_everything(address, job_id, token, generation):
    store = StoreClient(address, job_id, token, generation)
    assert store.ask(TRY_GET, key="k")[0] == ABSENT
    assert store.ask(SET, b"\0value", key="k")[0] == DONE
    assert store.ask(GET, key="k") == (VALUE, {}, b"\0value")
    assert store.ask(ADD, key="n", delta=-5)[1] == {"sum": -5}
    assert store.ask(ADD, key="n", delta=47)[1] == {"sum": 42}
    assert store.ask(TRY_GET, key="n")[2] == b"42"
    assert refusal(store.ask, ADD, key="n", delta=2**63 - 1) == "limit"
    assert store.ask(COMPARE_SET, b"new", key="c") == (EXCHANGED, {"swapped": True}, b"new")
    assert store.ask(COMPARE_SET, b"oldnewer", key="c", expected_bytes=3) == (EXCHANGED, {"swapped": False}, b"new")
    assert store.ask(COMPARE_SET, b"newnewer", key="c", expected_bytes=3) == (EXCHANGED, {"swapped": True}, b"newer")
    assert store.ask(ERASE, key="c")[1] == {"existed": True}
    assert store.ask(ERASE, key="c")[1] == {"existed": False}
    assert store.ask(WAIT, keys=["k", "n"])[0] == DONE
    assert store.ask(WAIT, keys=[])[0] == DONE
    assert refusal(store.ask, WAIT, keys=["k", "never"], timeout_ns=1000000) == "timeout"
    assert refusal(store.ask, GET, key="never", timeout_ns=0) == "timeout"
    assert store.ask(BARRIER, name="b", participants=1)[0] == DONE
    assert refusal(store.ask, 200) == "not_found", "a type that nobody knows"
    assert store.ask(TRY_GET, key="k")[0] == VALUE, "and the connection lives on"
    store.generation += 1
    assert refusal(store.ask, GET, key="k") == "mismatch", "it has not begun"
    store.generation -= 2
    assert refusal(store.ask, GET, key="k") == "stale_generation"
    assert refusal(StoreClient, address, job_id, "another token", generation) == "refused"
    assert refusal(StoreClient, address, "another job", token, generation) == "refused"

    store = StoreClient(address, job_id, token, generation)
    assert refusal(store.ask, SET, b"v") == "protocol", "no key"
    assert store.receive()[:2] == (FAILURE, 0), "the last word"
    try:
        store.receive()
        raise AssertionError("the connection is not closed")
    except ConnectionError:
        pass
    print("the document is right")


if __name__ == "__main__":
    if len(sys.argv) == 5:
        address, job, secret, number = sys.argv[1:]
    else:
        address, job = os.environ["DDPRUN_STORE"], os.environ["TORCHELASTIC_RUN_ID"]
        secret, number = os.environ["DDPRUN_TOKEN"], os.environ["DDPRUN_GENERATION"]
    try_everything(address, job, secret, int(number))
