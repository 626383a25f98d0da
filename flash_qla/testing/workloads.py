"""Workloads: the only list of shapes and the only builder of inputs, for tests, benchmark, profile and tools.

Tensors are drawn on the device that is asked for, from a generator of their own: the same seed gives the same numbers
on the same kind of device, whatever ran before.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
import torch.nn.functional as F

from flash_qla.ops.gated_delta_rule.chunk.constants import CHUNK_SIZE
from flash_qla.ops.gated_delta_rule.chunk.sequences import Sequences

# id -> what it is. Natural-log gates; see `make_gate`.
GATE_PROFILES = {
    "none": "g = 0: no decay",
    "mild": "logsigmoid(normal)/16, a random quarter of the heads at 0 (the peers' rows)",
    "strong": "-A softplus(0.5 normal + 1), A uniform in 0..16 per head, one head 0 and one head 16",
    "mixed": "heads in turn: 0, logsigmoid(normal)/16, A = 1, A = 16",
    "extreme": "mild, with -1e4 on 5% and -inf on another 5% of the tokens, and the last head at -1e4 throughout",
}

# (q/k heads, value heads) in the field, K = V = 128, whole and divided by the tensor-parallel size.
FIELD_HEADS = tuple(
    (16 // shards, num_v_heads // shards) for num_v_heads in (16, 32, 48, 64) for shards in (1, 2, 4, 8)
)

# Packed lengths around every boundary that the chunk arithmetic has.
LENGTH_CASES = {
    "one_token": [1],
    "below_chunk": [63],
    "one_chunk": [64],
    "above_chunk": [65],
    "ragged": [130, 7, 64, 200],
    "empties": [0, 5, 0, 70, 0],
    "all_empty": [0, 0],
    "unaligned_starts": [1, 64, 63, 129],
}


@dataclass(frozen=True)
class Workload:
    """One problem's sizes.

    Attributes:
        lengths: a list of tokens per packed sequence, or a tuple (B, T) of a dense input.
        num_k_heads, num_v_heads, head_dim_k, head_dim_v: Hq, Hv, K, V.
        gate_profile: a key of GATE_PROFILES.
        passes: "fwd", "bwd" or "fwdbwd", for rows that are timed.
    """

    lengths: list[int] | tuple[int, int]
    num_k_heads: int
    num_v_heads: int
    head_dim_k: int = 128
    head_dim_v: int = 128
    gate_profile: str = "mild"
    passes: str = "fwd"

    @property
    def id(self) -> str:
        """A short name for test ids and tables: pass, heads, lengths, gate."""
        dims = "" if self.head_dim_k == self.head_dim_v == 128 else f"-{self.head_dim_k}x{self.head_dim_v}"
        return f"{self.passes}-{self.num_k_heads}h{self.num_v_heads}{dims}-{self.lengths_id}-{self.gate_profile}"

    @property
    def lengths_id(self) -> str:
        """B2T512 dense; 8192x4 for four sequences of 8192; 28672+4096; 24mix32768 for 24 lengths of 32768 together."""
        if isinstance(self.lengths, tuple):
            return f"B{self.lengths[0]}T{self.lengths[1]}"
        if self.lengths and len(set(self.lengths)) == 1:
            return f"{self.lengths[0]}x{len(self.lengths)}"
        if len(self.lengths) > 8:
            return f"{len(self.lengths)}mix{sum(self.lengths)}"
        return "+".join(map(str, self.lengths))

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences together."""
        return self.lengths[0] * self.lengths[1] if isinstance(self.lengths, tuple) else sum(self.lengths)

    def make(self, **kwargs) -> Inputs:
        """Builds the tensors; keyword arguments as `make_inputs`."""
        sizes = (self.lengths, self.num_k_heads, self.num_v_heads, self.head_dim_k, self.head_dim_v)
        return make_inputs(*sizes, **{"gate_profile": self.gate_profile, **kwargs})


_FWD_LENGTHS = ((32768, 1), (8192, 1), (2048, 1), (16384, 2), (8192, 4), (4096, 8), (1024, 8))
_BWD_LENGTHS = ((32768, 1), (8192, 1), (8192, 4), (4096, 8))
# The rows of the published comparison: packed, mild gates, initial and final state.
PEER_ROWS = tuple(
    Workload([tokens] * count, num_k_heads, num_v_heads, passes=passes)
    for num_k_heads, num_v_heads in ((16, 64), (16, 32), (2, 8))
    for passes, rows in (("fwd", _FWD_LENGTHS), ("bwd", _BWD_LENGTHS))
    for tokens, count in rows
)
# Length mixes that the published comparison lacks: skewed, random (ragged chunks), many short ones, one very long one.
RANDOM_LENGTHS = [
    *(1853, 2411, 97, 640, 3127, 1, 2222, 815, 4001, 1024, 333, 1710),
    *(63, 2890, 1500, 65, 1281, 2048, 707, 512, 1999, 129, 2748, 592),
]
EXTRA_LENGTHS = ([28672, 4096], RANDOM_LENGTHS, [128] * 64, [131072])


def benchmark_rows() -> tuple[Workload, ...]:
    """Returns every row of the full benchmark: all field heads over the published lengths, the whole heads and one
    share over the extra ones, each pass; the published rows come first.
    """
    rows = list(PEER_ROWS)
    rows += [replace(row, passes="fwdbwd") for row in PEER_ROWS if row.passes == "bwd"]
    for heads in FIELD_HEADS:
        rows += [Workload([tokens] * count, *heads, passes="fwd") for tokens, count in _FWD_LENGTHS]
        rows += [
            Workload([tokens] * count, *heads, passes=p) for p in ("bwd", "fwdbwd") for tokens, count in _BWD_LENGTHS
        ]
    for heads in ((16, 16), (16, 32), (16, 48), (16, 64), (2, 8)):
        rows += [Workload(list(each), *heads, passes=p) for p in ("fwd", "bwd", "fwdbwd") for each in EXTRA_LENGTHS]
    return tuple({row.id: row for row in rows}.values())


CHECK_SETS = {
    "develop": "every gate profile and head ratio on short packed and dense inputs: a minute on two CPU cores",
    "varlen": "packed lengths around every chunk boundary, empty sequences, and very uneven ones",
    "profile": "the published comparison's shapes",
    "product": "the heads in the field over a long, a short and a batched input",
}


def check_rows(name: str) -> tuple[Workload, ...]:
    """Returns the rows of `tests/test_gdr.py --set name`; see CHECK_SETS. Each is checked forward and backward.

    Raises:
        KeyError: for a set that is not in CHECK_SETS.
    """
    ratios = ((2, 2), (2, 4), (1, 3), (1, 4), (1, 8))
    if name not in CHECK_SETS:
        raise KeyError(f"set {name!r} is not one of {', '.join(CHECK_SETS)}")
    if name == "develop":
        rows = [Workload([130, 0, 65], *heads, gate_profile=p) for heads, p in zip(ratios, GATE_PROFILES)]
        rows += [Workload((2, 200), 2, 4, gate_profile=p) for p in GATE_PROFILES]
        rows += [Workload((1, 200), 2, 4, *dims) for dims in ((64, 64), (64, 128), (80, 96))]
    elif name == "varlen":
        rows = [
            Workload(lengths, 2, 4, gate_profile=p) for lengths in LENGTH_CASES.values() for p in ("mild", "strong")
        ]
        rows += [Workload(lengths, 16, 32) for lengths in ([28672, 4096], RANDOM_LENGTHS, [128] * 64)]
    elif name == "profile":
        rows = [replace(row, passes="bwd") for row in PEER_ROWS]
    else:
        rows = [
            Workload(lengths, *heads, gate_profile=profile)
            for heads in FIELD_HEADS
            for lengths, profile in (([8192], "mild"), ([1000], "strong"), ((4, 1024), "mixed"))
        ]
    return tuple({row.id: row for row in (replace(row, passes="fwdbwd") for row in rows)}.values())


@dataclass(frozen=True)
class Inputs:
    """The tensors of one call and the cotangents for its backward.

    Attributes:
        q, k: `[B, T, Hq, K]`, L2-normalised.
        v: `[B, T, Hv, V]`.
        g: `[B, T, Hv]` natural-log gate.
        beta: `[B, T, Hv]` in (0, 1).
        initial_state: `[N, Hv, K, V]` or None.
        cu_seqlens: `[N + 1]` or None for a dense input.
        do, dht: cotangents of o and of the final state.
        scale: factor of q.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    initial_state: torch.Tensor | None
    cu_seqlens: torch.Tensor | None
    do: torch.Tensor
    dht: torch.Tensor
    scale: float
    lengths: list[int] = field(default_factory=list)

    @property
    def seqs(self) -> Sequences:
        host = None if self.cu_seqlens is None else self.cu_seqlens.cpu()
        return Sequences.build(*self.q.shape[:2], CHUNK_SIZE, self.cu_seqlens, host)

    @property
    def kwargs(self) -> dict:
        """Keyword arguments of `chunk_gated_delta_rule`."""
        names = ("q", "k", "v", "g", "beta", "initial_state", "cu_seqlens", "scale")
        return {name: getattr(self, name) for name in names}

    def differentiable(self) -> Inputs:
        """Returns a copy whose floating inputs are leaves that require gradients."""
        names = ("q", "k", "v", "g", "beta", "initial_state")
        tensors = {name: getattr(self, name) for name in names}
        return replace(self, **{n: x.detach().clone().requires_grad_() for n, x in tensors.items() if x is not None})


def make_gate(profile: str, shape, generator, device, dtype=torch.float32):
    """Draws natural-log gates `[B, T, Hv]`.

    Raises:
        ValueError: for a profile that is not in GATE_PROFILES.
    """
    if profile not in GATE_PROFILES:
        raise ValueError(f"gate_profile={profile!r} is not one of {', '.join(GATE_PROFILES)}")
    num_heads = shape[-1]

    def normal(*size):
        return torch.randn(*size, generator=generator, device=device, dtype=dtype)

    def uniform(*size):
        return torch.rand(*size, generator=generator, device=device, dtype=dtype)

    if profile == "none":
        return torch.zeros(shape, device=device, dtype=dtype)
    mild = F.logsigmoid(normal(*shape)) / 16
    rate = 16 * uniform(num_heads)
    decay = F.softplus(0.5 * normal(*shape) + 1)
    if profile == "strong":
        rate[0] = 0.0
        rate[-1] = 16.0
        return -rate * decay
    if profile == "mixed":
        profiles = torch.stack([0 * mild, mild, -decay, -16 * decay])
        kind = torch.arange(num_heads, device=device) % 4
        return profiles.gather(0, kind.expand(1, *shape)).squeeze(0)
    mild[..., torch.randperm(num_heads, generator=generator, device=device)[: num_heads // 4]] = 0.0
    if profile == "extreme":
        draw = uniform(*shape)
        mild = mild.masked_fill(draw < 0.05, -1e4).masked_fill(draw > 0.95, -torch.inf)
        mild[..., -1] = -1e4
    return mild


def make_inputs(
    lengths: list[int] | tuple[int, int],
    num_k_heads: int,
    num_v_heads: int,
    head_dim_k: int = 128,
    head_dim_v: int = 128,
    gate_profile: str = "strong",
    dtype: torch.dtype = torch.bfloat16,
    gate_dtype: torch.dtype = torch.float32,
    beta_dtype: torch.dtype = torch.float32,
    with_state: bool = True,
    seed: int = 0,
    device="cpu",
    *,
    state_dtype: torch.dtype = torch.float32,
    tail_tokens: int = 0,
    normalize: bool = True,
    index_dtype: torch.dtype = torch.int32,
) -> Inputs:
    """Draws one call's tensors as the published comparison does.

    Args:
        lengths: a list: one packed row of these sequences with `cu_seqlens`; a tuple (B, T): a dense input.
        gate_profile: a key of GATE_PROFILES.
        dtype: of q, k, v and do. float64 makes every other floating tensor float64 as well.
        with_state: whether there is an initial state.
        tail_tokens: rows after the last sequence (packed inputs only).
        normalize: whether q and k are L2-normalised.
        index_dtype: of cu_seqlens.

    Returns:
        q, k normal, v and do normal, beta sigmoid(normal), initial state normal, dht normal/8, scale K^-0.5.
    """
    if isinstance(lengths, tuple):
        (batch, num_tokens), num_seqs, cu_seqlens = lengths, lengths[0], None
        each = [num_tokens] * batch
    else:
        batch, num_tokens, num_seqs, each = 1, sum(lengths) + tail_tokens, len(lengths), list(lengths)
        cu_seqlens = torch.tensor([0, *accumulate(each)], dtype=index_dtype, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    wide = torch.float32
    if dtype == torch.float64:
        wide = gate_dtype = beta_dtype = state_dtype = torch.float64

    def normal(*size):
        return torch.randn(*size, generator=generator, device=device, dtype=wide)

    def unit(x):
        return F.normalize(x, dim=-1) if normalize else x

    rows = (batch, num_tokens)
    state = (num_seqs, num_v_heads, head_dim_k, head_dim_v)
    return Inputs(
        q=unit(normal(*rows, num_k_heads, head_dim_k)).to(dtype),
        k=unit(normal(*rows, num_k_heads, head_dim_k)).to(dtype),
        v=normal(*rows, num_v_heads, head_dim_v).to(dtype),
        g=make_gate(gate_profile, (*rows, num_v_heads), generator, device, wide).to(gate_dtype),
        beta=normal(*rows, num_v_heads).sigmoid().to(beta_dtype),
        initial_state=normal(*state).to(state_dtype) if with_state else None,
        cu_seqlens=cu_seqlens,
        do=normal(*rows, num_v_heads, head_dim_v).to(dtype),
        dht=(normal(*state) / 8).to(wide),
        scale=head_dim_k**-0.5,
        lengths=each,
    )
