"""Sets of tensors as one buffer: a safetensors file whose header never changes for a run.

The `safetensors` package reads and writes whole files. Here the header is made once and the
tensors are views into the buffer that is sent, so a gradient is written straight into the body
of its request.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .errors import SkepError

# Element types in the order of the safetensors format, smallest alignment first.
_ORDER = ["BOOL", "U8", "I8", "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "F64", "I64", "U64"]

#: numpy's type for each element type. BF16, which numpy lacks, is the upper half of an F32.
NUMPY = {
    "BOOL": np.dtype("?"),
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
    "I16": np.dtype("<i2"),
    "U16": np.dtype("<u2"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "I32": np.dtype("<i4"),
    "U32": np.dtype("<u4"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "I64": np.dtype("<i8"),
    "U64": np.dtype("<u8"),
}


class Spec(NamedTuple):
    """One tensor of a run."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    role: Mapping[str, Any]

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Spec:
        role = {k: v for k, v in value.items() if k not in ("name", "dtype", "shape")}
        return cls(value["name"], value["dtype"], tuple(value["shape"]), role)

    def to_json(self) -> dict[str, Any]:
        shape = list(self.shape)
        return {"name": self.name, "dtype": self.dtype, "shape": shape, **self.role}

    @property
    def kind(self) -> str:
        """`trainable`, `buffer`, `ema` or `frozen`."""
        return str(self.role["role"])


class Place(NamedTuple):
    """Where a tensor lies in a frame, in bytes behind the header."""

    spec: Spec
    dtype: str
    start: int
    stop: int


class Layout:
    """The header of a kind of frame, and what it says."""

    def __init__(self, specs: Iterable[Spec], encoding: str = "f32") -> None:
        def travels_as(spec: Spec) -> str:
            return "BF16" if encoding == "bf16" and spec.dtype == "F32" else spec.dtype

        typed = sorted(
            ((spec, travels_as(spec)) for spec in specs),
            key=lambda pair: (-_ORDER.index(pair[1]), pair[0].name.encode()),
        )
        self.places: list[Place] = []
        header: dict[str, Any] = {}
        offset = 0
        for spec, dtype in typed:
            size = NUMPY[dtype].itemsize * int(np.prod(spec.shape, dtype=np.int64))
            self.places.append(Place(spec, dtype, offset, offset + size))
            header[spec.name] = {
                "dtype": dtype,
                "shape": list(spec.shape),
                "data_offsets": [offset, offset + size],
            }
            offset += size
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self.prefix = struct.pack("<Q", len(text)) + text
        self.size = len(self.prefix) + offset
        # The order keeps tensors of one element type together.
        floats = [place for place in self.places if place.dtype == "F32"]
        self.floats = (floats[0].start, floats[-1].stop) if floats else (0, 0)


class Frame:
    """A buffer with a tensor at each place of a layout."""

    def __init__(self, layout: Layout, buffer: bytes | bytearray) -> None:
        self.layout = layout
        self.buffer = buffer

    @classmethod
    def zeros(cls, layout: Layout) -> Frame:
        buffer = bytearray(layout.size)
        buffer[: len(layout.prefix)] = layout.prefix
        return cls(layout, buffer)

    @classmethod
    def read(cls, layout: Layout, data: bytes) -> Frame:
        """Takes over a file that came from the hive. Its header is the layout's."""
        if len(data) != layout.size or not data.startswith(layout.prefix):
            raise SkepError(
                "the hive sent other tensors than the run has",
                "are client and hive of the same version?",
            )
        return cls(layout, data)

    def offset(self, place: Place) -> int:
        """Where a tensor's bytes begin in the buffer."""
        return len(self.layout.prefix) + place.start

    def array(self, place: Place) -> np.ndarray:
        """A tensor as a view into the buffer."""
        count = int(np.prod(place.spec.shape, dtype=np.int64))
        flat = np.frombuffer(self.buffer, NUMPY[place.dtype], count, self.offset(place))
        return flat.reshape(place.spec.shape)

    def unfinite(self) -> str | None:
        """The name of a float32 tensor that holds a NaN or an infinity, if there is one."""
        start, stop = self.layout.floats
        offset = len(self.layout.prefix) + start
        values = np.frombuffer(self.buffer, "<f4", (stop - start) // 4, offset)
        # Nearly always the sum is finite, and then so is every value.
        with np.errstate(all="ignore"):
            if np.isfinite(values.sum()):
                return None
        for place in self.layout.places:
            if place.dtype == "F32" and not np.isfinite(self.array(place)).all():
                return place.spec.name
        return None

    def narrowed(self, layout: Layout) -> Frame:
        """The same tensors, float32 as bfloat16. `layout` is that of the encoding."""
        frame = Frame.zeros(layout)
        here = {place.spec.name: place for place in self.layout.places}
        for place in layout.places:
            array = self.array(here[place.spec.name])
            frame.array(place)[...] = narrow(array) if place.dtype == "BF16" else array
        return frame


def widen(halves: np.ndarray) -> np.ndarray:
    """BF16 to F32."""
    wide: np.ndarray = (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return wide


def narrow(values: np.ndarray) -> np.ndarray:
    """F32 to BF16, to the nearest, ties to even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    halves: np.ndarray = (rounded >> np.uint32(16)).astype(np.uint16)
    return halves


def specs_of(schema: Sequence[Mapping[str, Any]]) -> list[Spec]:
    """The tensors of a run as the hive lists them."""
    return [Spec.from_json(tensor) for tensor in schema]
