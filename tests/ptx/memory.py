"""The memory that a kernel sees: its parameters, shared memory, and the host's tensors by their real addresses."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

from .program import PARAM

WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
SWIZZLES = {0: 0, 1: 1, 2: 3, 3: 7}  # CUtensorMapSwizzle → bits of the 16-byte unit's number that are xored
SHARED_END = 1 << 24


class Region:
    """Bytes from `start` to `end`, as words of each size from `base` on; accesses beyond them raise."""

    def __init__(self, start: int, end: int, data: np.ndarray, base: int):
        self.start, self.end, self.base = start, end, base
        self.words = {size: data[: len(data) // size * size].view(dtype) for size, dtype in WORDS.items()}

    @classmethod
    def of_host(cls, start: int, size: int) -> Region:
        """Host memory; its base is aligned, so that words of every size can be addressed."""
        base = start & ~15
        length = (start + size - base + 15) & ~15
        data = np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(base))
        return cls(start, start + size, data, base)


@dataclass
class TensorMap:
    """A TMA descriptor: sizes, strides in bytes and box, innermost axis first."""

    region: Region
    address: int
    itemsize: int
    shape: list[int]
    strides: list[int]
    box: list[int]
    swizzle: int

    def check(self) -> None:
        """Raises ValueError for what cuTensorMapEncodeTiled refuses, or what reaches beyond the tensor."""
        if self.address % 16 or any(stride % 16 for stride in self.strides[1:]):
            raise ValueError(f"TMA: address {self.address:#x} or strides {self.strides} are no multiples of 16")
        if min(self.shape) < 1 or not all(0 < n <= 256 for n in self.box):
            raise ValueError(f"TMA: shape {self.shape}, box {self.box}")
        inner = self.box[0] * self.itemsize
        if inner % 16 or (self.swizzle and inner > 16 << self.swizzle):
            raise ValueError(f"TMA: {inner} bytes of a box row with swizzle {self.swizzle}")
        last = self.address + sum((n - 1) * stride for n, stride in zip(self.shape, self.strides)) + self.itemsize
        if not self.region.start <= self.address <= last <= self.region.end:
            raise ValueError(f"TMA: the descriptor reaches beyond its tensor: {self}")

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.box)) * self.itemsize

    def places(self, coordinates):
        """Returns (indices of the box's items in the tensor's words, whether each lies inside), innermost axis last."""
        index, inside = np.int64((self.address - self.region.base) // self.itemsize), np.True_
        axes = len(self.box)
        for axis, (at, size, stride, box) in enumerate(zip(coordinates, self.shape, self.strides, self.box)):
            where = at + np.arange(box)
            ok = (where >= 0) & (where < size)
            form = [1] * axes
            form[axes - 1 - axis] = box
            index = index + (np.where(ok, where, 0) * (stride // self.itemsize)).reshape(form)
            inside = inside & ok.reshape(form)
        return index.reshape(-1), np.broadcast_to(inside, self.box[::-1]).reshape(-1)

    def shared_places(self, at: int):
        """Indices, in words of the item's size, of the box in shared memory at an address."""
        linear = at + np.arange(int(np.prod(self.box))) * self.itemsize
        return (linear ^ (((linear >> 7) & SWIZZLES[self.swizzle]) << 4)) // self.itemsize


class Memory:
    """Of one launch; `shared` is renewed for each CTA."""

    def __init__(self, regions: list[Region], parameters: np.ndarray):
        self.regions = [*regions, Region(PARAM, PARAM + len(parameters), parameters, PARAM)]
        self.shared = None

    def new_shared(self, size: int) -> None:
        """Poison: NaN in every floating type."""
        self.shared = Region(0, size, np.full(-(-size // 16) * 16, 0xFF, np.uint8), 0)

    def locate(self, addresses, nbytes: int) -> Region:
        """The region of the addresses of all (active) lanes."""
        low, high = int(addresses.min()), int(addresses.max()) + nbytes
        region = self._holding(low, high)
        if region is None:
            raise IndexError(f"no tensor holds the {nbytes} bytes at {low:#x} to {high - nbytes:#x}")
        if high > region.end:
            raise IndexError(f"shared memory has {region.end} bytes; accessed up to {high}")
        return region

    def _holding(self, low: int, high: int) -> Region | None:
        """The region of the bytes from low to high, None where no single one has them."""
        if high <= SHARED_END:
            return self.shared
        return next((r for r in self.regions if r.start <= low and high <= r.end), None)

    def by_tensor(self, addresses, nbytes: int, active):
        """The active lanes (None: all) as groups whose addresses lie in one tensor each, nearly always one group."""
        used = addresses if active is None else addresses[active]
        if self._holding(int(used.min()), int(used.max()) + nbytes) is not None:
            return [active]
        active_lanes = np.ones(len(addresses), bool) if active is None else active
        held = [(addresses >= r.start) & (addresses + nbytes <= r.end) & active_lanes for r in self.regions]
        groups = [lanes for lanes in held if lanes.any()]
        return groups if len(groups) > 1 and sum(groups).all(where=active_lanes) else [active]

    def access(self, addresses, size: int, vector: int, active):
        """Returns (words, indices [vector, lanes]) of an access by the active lanes (None: all)."""
        if active is not None:
            addresses = np.where(active, addresses, addresses[active.argmax()])
        if (addresses & (size * vector - 1)).any():
            raise IndexError(f"misaligned access of {size * vector} bytes")
        region = self.locate(addresses, size * vector)
        index = (addresses - region.base) // size if size > 1 else addresses - region.base
        return region.words[size], index + np.arange(vector)[:, None]
