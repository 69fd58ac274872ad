"""Reads an event file of TensorBoard, from the description of its format, and prints it as JSON lines.

TFRecord (https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details): length as u64,
masked crc32c of the length, data, masked crc32c of the data; mask(crc) = ((crc >> 15) | (crc << 17)) + 0xa282ead8.
Data is a protocol buffer (https://protobuf.dev/programming-guides/encoding/): Event { 1: double wall_time,
2: int64 step, 3: string file_version, 5: Summary { repeated 1: Value { 1: string tag, 2: float simple_value } },
7: SessionLog { 1: enum status } }.
"""

import json
import struct
import sys


def crc32c(data):
    """Castagnoli's polynomial, reflected, bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


assert crc32c(b"123456789") == 0xE3069283  # the check value of CRC-32C


def check(data, masked):
    crc = crc32c(data)
    assert ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF == masked, "crc"


def records(data):
    at = 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        check(data[at : at + 8], struct.unpack_from("<I", data, at + 8)[0])
        record = data[at + 12 : at + 12 + length]
        check(record, struct.unpack_from("<I", data, at + 12 + length)[0])
        yield record
        at += 16 + length


def varint(data, at):
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        shift += 7
        at += 1
        if data[at - 1] < 0x80:
            return value, at


def fields(data):
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        if key & 7 == 0:
            value, at = varint(data, at)
        elif key & 7 == 1:
            (value,), at = struct.unpack_from("<d", data, at), at + 8
        elif key & 7 == 2:
            length, at = varint(data, at)
            value, at = data[at : at + length], at + length
        elif key & 7 == 5:
            (value,), at = struct.unpack_from("<f", data, at), at + 4
        else:
            raise ValueError(f"wire type {key & 7}")
        yield key >> 3, value


for record in records(open(sys.argv[1], "rb").read()):
    event = {"scalars": {}}
    for number, value in fields(record):
        if number == 1:
            event["wall_time"] = value
        elif number == 2:
            event["step"] = value
        elif number == 3:
            event["version"] = value.decode()
        elif number == 5:
            for _, entry in fields(value):
                entry = dict(fields(entry))
                event["scalars"][entry[1].decode()] = entry[2]
        elif number == 7:
            event["session"] = dict(fields(value))[1]
    print(json.dumps(event))
