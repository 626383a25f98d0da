"""Sequences: the only home of varlen arithmetic.

A dense input `[B, T, ...]` is B sequences of T tokens; a packed one is `[1, T, ...]` with `cu_seqlens` of N + 1
offsets. Everything downstream sees N sequences inside one flat token axis of `B * T` rows.

Chunk slots. Kernels may not read `cu_seqlens` on the host, so they address chunks by a *slot* whose number needs no
prefix sum: sequence n owns the slots from `start_n // C + n` on (C the chunk size, start_n its first flat token).
Since `ceil(len / C) <= end // C - start // C + 1`, slots never collide, they ascend with (sequence, chunk), and their
number is bounded by `tokens // C + N`. Slots that no chunk owns are skipped. `tiles/program.py` holds the device half.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

import torch


@dataclass(frozen=True)
class Sequences:
    """N sequences over `batch * num_tokens` flat rows.

    Attributes:
        batch, num_tokens: B and T of the tensors.
        num_seqs: N. B for dense inputs.
        chunk_size: C.
        cu_seqlens: `[N + 1]` int32 or int64 where the caller put it, None for dense inputs.
        cu_seqlens_cpu: the same on the host when the caller gave it (or gave cu_seqlens on the host).
    """

    batch: int
    num_tokens: int
    num_seqs: int
    chunk_size: int
    cu_seqlens: torch.Tensor | None = None
    cu_seqlens_cpu: torch.Tensor | None = None
    _cache: dict = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def build(cls, batch, num_tokens, chunk_size, cu_seqlens=None, cu_seqlens_cpu=None) -> Sequences:
        if cu_seqlens is None:
            return cls(batch, num_tokens, batch, chunk_size)
        if cu_seqlens_cpu is None and cu_seqlens.device.type == "cpu":
            cu_seqlens_cpu = cu_seqlens
        return cls(batch, num_tokens, cu_seqlens.numel() - 1, chunk_size, cu_seqlens, cu_seqlens_cpu)

    @property
    def is_varlen(self) -> bool:
        return self.cu_seqlens is not None

    @property
    def flat_tokens(self) -> int:
        return self.batch * self.num_tokens

    @property
    def max_slots(self) -> int:
        """Upper bound of chunk slots (see the module's docstring); exact arithmetic, no device read."""
        return self.flat_tokens // self.chunk_size + self.num_seqs

    @property
    def lengths_on_host(self) -> bool:
        """Whether `bounds()` needs no device read."""
        return not self.is_varlen or self.cu_seqlens_cpu is not None

    def zero_padding(self, x: torch.Tensor) -> torch.Tensor:
        """Returns `[B, T, H]` with zeros in the rows of no sequence: their NaN must reach no sum. No device read."""
        if not self.is_varlen:
            return x
        rows, cu = torch.arange(self.num_tokens, device=x.device), self.cu_seqlens.to(x.device)
        return x.masked_fill(((rows < cu[0]) | (rows >= cu[-1])).view(-1, 1), 0)

    def zero_padding_(self, *tensors: torch.Tensor) -> None:
        """Zeroes the rows of no sequence of `[B, T, H, D]` tensors in place, where the host knows the offsets.

        With offsets on the device alone it does nothing: a mask over all rows would cost a pass over the tensors.
        """
        if self.is_varlen and self.lengths_on_host:
            bounds = self.bounds() or [(0, 0)]
            for x in tensors:
                x[:, : bounds[0][0]] = 0
                x[:, bounds[-1][1] :] = 0

    def bounds(self) -> list[tuple[int, int]]:
        """Returns (start, end) flat rows of each sequence. Reads the device once when the host has no copy.

        Ends are clipped to the rows that exist and never lie before their start: nobody validates `cu_seqlens`
        values on the hot path, and no reader may leave the tensors.
        """
        if "bounds" not in self._cache:
            if not self.is_varlen:
                t = self.num_tokens
                cu = [n * t for n in range(self.num_seqs + 1)]
            else:
                source = self.cu_seqlens if self.cu_seqlens_cpu is None else self.cu_seqlens_cpu
                cu = [min(max(int(x), 0), self.flat_tokens) for x in source.tolist()]
            self._cache["bounds"] = [(s, max(s, e)) for s, e in zip(cu, cu[1:])]
        return self._cache["bounds"]

    def num_chunks(self) -> list[int]:
        """Chunks of each sequence, 0 for an empty one. Same cost as `bounds()`."""
        if "num_chunks" not in self._cache:
            self._cache["num_chunks"] = [-(-(e - s) // self.chunk_size) for s, e in self.bounds()]
        return self._cache["num_chunks"]

    def first_chunks(self) -> list[int]:
        """The number of each sequence's first chunk, all chunks counted in order."""
        if "first_chunks" not in self._cache:
            self._cache["first_chunks"] = list(accumulate(self.num_chunks()[:-1], initial=0))[: self.num_seqs]
        return self._cache["first_chunks"]

    def total_chunks(self) -> int:
        return sum(self.num_chunks())

    def first_slots(self) -> list[int]:
        """First chunk slot of each sequence, as the kernels compute it."""
        return [s // self.chunk_size + n for n, (s, _) in enumerate(self.bounds())]

    def chunk_rows(self, device) -> torch.Tensor:
        """Returns int64 `[total_chunks, C]`: the flat row of each chunk position, -1 past the sequence's end."""
        rows = [
            torch.where(r < e, r, -1)
            for s, e in self.bounds()
            if e > s
            for r in (torch.arange(s, s + -(-(e - s) // self.chunk_size) * self.chunk_size, device="cpu"),)
        ]
        flat = torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64, device="cpu")
        return flat.view(-1, self.chunk_size).to(device)

    def chunk_seq(self) -> list[tuple[int, int]]:
        """(sequence, chunk index inside it) of every chunk, in order."""
        return [(n, c) for n, count in enumerate(self.num_chunks()) for c in range(count)]
