#!/usr/bin/env python3
"""Reads the curves of a directory of TensorBoard's event files as TensorBoard shows them, checking every sum.

Takes the directory; prints JSON: {"files": [names], "curves": {tag: [[step, value], ...]}}. A record that a file ends in is
left out; one with a wrong sum is an error. It shares nothing with the writer (env/io/curve_file).
"""

import json
import math
import pathlib
import struct
import sys


def divided(byte):
    """The remainder of a byte by the polynomial of CRC-32C."""
    for _ in range(8):
        byte = (byte >> 1) ^ (0x82F63B78 if byte & 1 else 0)
    return byte


REMAINDERS = [divided(byte) for byte in range(256)]


def masked_crc(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ REMAINDERS[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def events(path):
    """The events of a file: its whole records, unpacked."""
    data, at = path.read_bytes(), 0
    while len(data) - at >= 12:
        (length,) = struct.unpack_from("<Q", data, at)
        if struct.unpack_from("<I", data, at + 8)[0] != masked_crc(data[at:at + 8]):
            sys.exit(f"{path}: byte {at}: the sum of the length is wrong")
        if len(data) - at < 12 + length + 4:
            return
        event = data[at + 12:at + 12 + length]
        if struct.unpack_from("<I", data, at + 12 + length)[0] != masked_crc(event):
            sys.exit(f"{path}: byte {at}: the sum of the data is wrong")
        yield fields(event)
        at += 12 + length + 4


def varint(data, at):
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        shift += 7
        at += 1
        if data[at - 1] < 0x80:
            return value, at


def fields(message):
    """{field: [values]} of a protobuf message."""
    found, at = {}, 0
    while at < len(message):
        key, at = varint(message, at)
        if key & 7 == 0:
            value, at = varint(message, at)
        elif key & 7 == 2:
            size, at = varint(message, at)
            value, at = message[at:at + size], at + size
        else:
            form, size = {1: ("<d", 8), 5: ("<f", 4)}[key & 7]
            value, at = struct.unpack_from(form, message, at)[0], at + size
        found.setdefault(key >> 3, []).append(value)
    return found


def read(directory):
    curves, files, has_begun = {}, sorted(directory.glob("events.out.tfevents.*")), False
    for path in files:
        for number, event in enumerate(events(path)):
            if number == 0 and event.get(3) != [b"brain.Event:2"]:
                sys.exit(f"{path}: its first event is not the version")
            step = event.get(2, [0])[0]  # protobuf leaves out a zero
            if 7 in event and fields(event[7][0]) == {1: [1]}:  # SessionLog.START
                if has_begun:
                    curves = {tag: [p for p in points if p[0] < step] for tag, points in curves.items()}
                has_begun = True
            for value in fields(event[5][0]).get(1, []) if 5 in event else []:
                scalar = fields(value)
                curves.setdefault(scalar[1][0].decode(), []).append([step, scalar[2][0]])
    return {"files": [path.name for path in files], "curves": curves}


if __name__ == "__main__":
    found = read(pathlib.Path(sys.argv[1]))
    # JSON has no nan and no inf: they are texts.
    for points in found["curves"].values():
        for point in points:
            if not math.isfinite(point[1]):
                point[1] = str(point[1])
    print(json.dumps(found))
