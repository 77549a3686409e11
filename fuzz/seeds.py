#!/usr/bin/env python3
"""Writes the seeds: one small good input or two for each target, so that a short run starts deep.

Run it after a change of a format, and keep what it writes.
"""
import gzip
import io
import json
import pickle
import struct
import tarfile
import zipfile
from pathlib import Path

HERE = Path(__file__).parent / "seeds"


def write(target: str, name: str, data: bytes) -> None:
    (HERE / target).mkdir(parents=True, exist_ok=True)
    (HERE / target / name).write_bytes(data)


def safetensors(header: dict, data: bytes) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def tensors(*parts: tuple) -> tuple[dict, bytes]:
    header, data = {}, b""
    for name, dtype, shape, content in parts:
        ends = [len(data), len(data) + len(content)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": ends}
        data += content
    return header, data


LEASE = "0123456789abcdef0123456789abcdef"
write("envelope", "full", (
    f"skep-lease: {LEASE}\nskep-sequence: 0\nskep-first: 128\nskep-count: 32\nskep-base: 2.140\n"
    "skep-kind: gradient\nskep-encoding: bf16\nskep-loss: 0.5\nskep-want: f32\nskep-have: 2.139\n"
    "skep-without: frozen\n"
).encode())
write("envelope", "receipt", b"skep-outcome: stepped\nskep-version: 2.141\nskep-durable: 2.100\n")
for name in ["2.140", LEASE, "bf16", "mnist-2", "ab" * 32]:
    write("names", name[:8], name.encode())

SCHEMA = [
    {"name": "w", "dtype": "F32", "shape": [2], "role": "trainable", "group": "default"},
    {"name": "m", "dtype": "F32", "shape": [2], "role": "buffer", "merge": "mean"},
    {"name": "e", "dtype": "F32", "shape": [2], "role": "ema", "of": "w", "tau": 0.5},
    {"name": "f", "dtype": "I64", "shape": [], "role": "frozen"},
]
SHARD = {"hash": "ab" * 32, "samples": 4, "bytes": 100}
NAMED = {"name": "fashion/train", "samples": 4}
JOB = {"run": {"epochs": 1, "seed": 7}, "train": {"batch": 4, "every": 2, "encoding": "bf16"},
       "policy": {"kind": "sync", "slots": 4}, "optimiser": {"kind": "sgd", "rate": 0.1}}
SPEC = {"name": "bees", "job": JOB, "schema": SCHEMA,
        "manifest": {"source": "here", "train": [SHARD], "validation": [NAMED], "test": [SHARD]}}
MESSAGES = {
    "l": {"worker": "bee", "engine": "flex", "seconds_left": 40.0, "has": ["ab" * 32],
          "kinds": ["train", "evaluate"], "wait": 1.0},
    "a": {"answer": "wait", "seconds": 0.5, "reason": "paused"},
    "r": SPEC, "j": JOB, "s": SCHEMA, "m": SPEC["manifest"],
    "k": {"role": "worker", "run": "bees", "seconds": 60.0},
    "g": {"failure": "broken"},
    "o": [{"time": 1, "worker": "bee", "level": "info", "message": "hum"}],
    "c": {"action": "pause"}, "e": {"loss_sum": 1.5, "correct": 3},
    "x": {"code": "busy", "message": "later", "hint": ""},
}
for which, message in MESSAGES.items():
    write("messages", which, which.encode() + json.dumps(message).encode())

wide = tensors(("n", "I64", [], bytes(8)), ("w", "F32", [2, 2], bytes(16)), ("u", "U8", [3], b"abc"))
narrow = tensors(("n", "I64", [], bytes(8)), ("w", "BF16", [2, 2], bytes(8)), ("u", "U8", [3], b"abc"))
write("frame", "wide", safetensors(*wide))
write("frame", "narrow", safetensors(*narrow))
header, data = tensors(("f", "I64", [], bytes(8)), ("e", "F32", [2], bytes(8)),
                       ("m", "F32", [2], bytes(8)), ("w", "F32", [2], bytes(8)))
write("run_file", "bees", safetensors({"__metadata__": {"skep.run": json.dumps(SPEC)}, **header}, data))
write("shard", "two-columns", safetensors(*tensors(
    ("image", "U8", [3, 2, 2], bytes(12)), ("label", "U8", [3], b"\1\2\3"))))
write("shard", "numbers", safetensors(*tensors(
    ("x", "F32", [2, 1], bytes(8)), ("y", "I64", [2], bytes(16)))))
plain = b"\0\0\x08\x03" + struct.pack(">III", 2, 2, 2) + bytes(range(8))
write("idx", "images", plain)
write("idx", "images.gz", gzip.compress(plain, mtime=0))
write("idx", "labels", b"\0\0\x08\x01" + struct.pack(">I", 3) + b"\1\2\3")

# What `torch.save` pickles for {"w": tensor([..])}, without torch: protocol 2.
write("pickle", "tensor", (
    b"\x80\x02}q\x00X\x01\x00\x00\x00wq\x01ctorch._utils\n_rebuild_tensor_v2\nq\x02((X\x07\x00\x00\x00"
    b"storageq\x03ctorch\nFloatStorage\nq\x04X\x01\x00\x00\x000q\x05X\x03\x00\x00\x00cpuq\x06K\x10tq\x07Q"
    b"K\x00K\x02K\x02\x86q\x08K\x02K\x01\x86q\x09\x89ccollections\nOrderedDict\nq\n)Rq\x0btq\x0cRq\rs."))
for protocol in [2, 4]:
    file = io.BytesIO()
    pickle.Pickler(file, protocol).dump({"state_dict": {"a": [1, 2.5, None, True, ("x", b"y")]}})
    write("pickle", f"plain-{protocol}", file.getvalue())

REF = {"sha256": "ab" * 32, "bytes": 5}
MANIFEST = {"format": 1, "version": "1.2", "created": 1, "model": REF, "optimiser": REF,
            "state": {"run": {"number": 2}}, "provenance": {}}
write("checkpoint", "manifest", b"\0" + json.dumps(MANIFEST).encode())
write("checkpoint", "run", b"\1" + json.dumps(
    {"format": 1, "created": 1, "spec": SPEC, "version0": REF, "provenance": {}}).encode())
write("checkpoint", "latest", b"\2" + json.dumps({"format": 1, "version": "1.2"}).encode())

KERAS = Path(__file__).parent.parent / "crates/data/tests/fixtures/keras"
for archive, name in [("imdb", "x_train"), ("imdb", "y_train"), ("padded", "x_test"), ("hostile", "x_test")]:
    with zipfile.ZipFile(KERAS / f"{archive}.npz") as arrays:
        write("texts", f"{archive}-{name}", arrays.read(f"{name}.npy"))
write("texts", "vocabulary", json.dumps(
    {"format": 1, "length": 4, "classes": ["no", "yes"], "words": ["it's", "a"]}).encode())
write("texts", "review", "It's a film.<br /><BR>Isn’t it? 8/10 Ünd".encode())


def npy(kind: str, shape: tuple, content: bytes) -> bytes:
    header = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + content


COLUMNS = {"image": npy("|u1", (3, 2, 2), bytes(12)), "label": npy("<i8", (3,), bytes(24))}
KINDS = [{"name": "image", "dtype": "U8", "shape": [2, 2]}, {"name": "label", "dtype": "I64", "shape": []}]
packed = io.BytesIO()
with zipfile.ZipFile(packed, "w") as arrays:
    for name, content in COLUMNS.items():
        arrays.writestr(zipfile.ZipInfo(f"{name}.npy"), content)
write("table_file", "npz", b"\0" + packed.getvalue())
write("table_file", "safetensors", b"\1" + safetensors(*tensors(("label", "U8", [3], b"\1\2\3"))))
unpacked = io.BytesIO()
with tarfile.open(fileobj=unpacked, mode="w") as arrays:
    table = json.dumps({"format": 1, "rows": 3, "columns": KINDS}).encode()
    for name, content in {"table.json": table, **{f"{name}.npy": column for name, column in COLUMNS.items()}}.items():
        entry = tarfile.TarInfo(name)
        entry.size = len(content)
        arrays.addfile(entry, io.BytesIO(content))
write("table_file", "tar.gz", b"\2" + gzip.compress(unpacked.getvalue(), mtime=0))
FILE = {"samples": 3, "bytes": 9, "sha256": "ab" * 32, "labels": {"0": 2, "1": 1}}
write("table_file", "description", b"\3" + json.dumps({
    "kind": "skep-dataset", "format": 1, "source": "here", "split": "label", "copy": {"number": 1, "of": 2},
    "columns": KINDS, "classes": [{"label": 0, "name": "ant", "train": 2, "validation": 0, "test": 2}],
    "files": [{"path": "train-00001-of-00001.npz", "split": "train", **FILE},
              {"path": "test.npz", "split": "test", **FILE}],
    "assets": [{"path": "classes.json", "bytes": 9, "sha256": "ab" * 32}]}).encode())
