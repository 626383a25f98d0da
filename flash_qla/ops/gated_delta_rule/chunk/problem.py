"""Problem: sizes, dtypes and flags of one call, and every error message of the operator.

All checks read metadata only (no device read, no launch), raise before anything is compiled, and are plain `raise`
statements, so they also hold under `python -O`. `check_values` is the exception, for FLASH_QLA_DEBUG=1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import NamedTuple

import torch

from .constants import CHUNK_SIZE
from .sequences import Sequences

MAX_HEAD_DIM = 256
INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
SMALL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # gates, beta and states


def _names(dtypes) -> str:
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes)


class _Meta(NamedTuple):
    """What validation may look at; equal metadata is validated once (`_known`)."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    device: torch.device | None
    got: str | None = None  # what something is that is no dense tensor

    @classmethod
    def of(cls, x) -> _Meta | None:
        if isinstance(x, torch.Tensor):
            if x.is_nested:
                return cls((), None, None, f"a nested tensor of layout {x.layout}")
            if x.layout is not torch.strided:
                return cls((), None, None, f"a tensor of layout {x.layout}")
            if x.is_neg():  # its memory holds the negative values, and kernels read memory
                return cls((), None, None, "a lazily negated view; call resolve_neg() on it")
            return cls(x.shape, x.dtype, x.device)
        return x if x is None or isinstance(x, cls) else cls((), None, None, type(x).__name__)


def _shape(x) -> tuple[int, ...]:
    return tuple(x.shape)


def _require_tensor(name, x, dims, axes):
    if x is None or x.got is not None:
        raise ValueError(f"{name} must be a torch.Tensor {axes}, got {'None' if x is None else x.got}")
    if len(x.shape) != dims:
        raise ValueError(f"{name} must have {dims} dimensions {axes}, got shape {_shape(x)}")


def require_tensor(name: str, x, dims: int, axes: str) -> None:
    """Raises ValueError unless x is a dense tensor of so many dimensions, called `axes` in the message."""
    _require_tensor(name, _Meta.of(x), dims, axes)


def _require_dtype(name, dtype, allowed, why=""):
    if dtype not in allowed:
        raise ValueError(f"{name} has dtype {_names([dtype])}; supported: {_names(allowed)}{why}")


def _require_shape(name, x, expected, axes):
    if _shape(x) != tuple(expected):
        raise ValueError(f"{name} must have shape {axes} = {tuple(expected)}, got {_shape(x)}")


def _as_float(name, x) -> float | None:
    if x is None:
        return None
    if isinstance(x, bool) or not isinstance(x, Real):
        raise ValueError(f"{name} must be None or a number, got {x!r}")
    try:
        return float(x)
    except OverflowError:
        raise ValueError(f"{name} must be None or a number within float64's range, got one beyond it") from None


def check_flags(**flags) -> None:
    """Raises ValueError unless each is a bool, or what callers pass for one: 0, 1, numpy's, or None for False.

    Anything else would pass by its truth value, as the text "False" does, or fail for want of one, as a tensor does.
    """
    for name, x in flags.items():
        if x is None or type(x).__name__ in ("bool", "bool_") or (isinstance(x, Integral) and x in (0, 1)):
            continue
        raise ValueError(f"{name} must be True or False, got {'a tensor' if isinstance(x, torch.Tensor) else repr(x)}")


def _span(shape, strides) -> int:
    """Elements between the first and the last one of a strided tensor, both included."""
    return 1 + sum((n - 1) * stride for n, stride in zip(shape, strides))


def _overlaps_itself(x) -> bool:
    span = 1
    for stride, n in sorted((stride, n) for stride, n in zip(x.stride(), x.shape) if n > 1):
        if stride < span:
            return True
        span += (n - 1) * stride
    return False


def _overlap(x, y) -> bool:
    """Whether two tensors may share memory. Columns of the rows of one `[B, T, ...]` buffer, side by side, do not."""
    if x.numel() == 0 or y.numel() == 0:
        return False
    distance = y.data_ptr() - x.data_ptr()
    ends = [_span(t.shape, t.stride()) * t.element_size() for t in (x, y)]
    if not -ends[1] < distance < ends[0]:
        return False
    if min(x.dim(), y.dim()) < 3:
        return True
    (pitch, other), batches = ([t.stride(i) * t.element_size() for t in (x, y)] for i in (1, 0))
    if pitch < 1 or pitch != other or any(b % pitch for b in batches):
        return True
    widths = [_span(t.shape[2:], t.stride()[2:]) * t.element_size() for t in (x, y)]
    return not widths[0] <= distance % pitch <= pitch - widths[1]


@dataclass(frozen=True)
class Problem:
    """What one call computes; built by `Problem.check` only, so an instance is always valid.

    Attributes:
        batch, num_tokens, num_seqs: B, T, N (N = B for dense inputs).
        num_k_heads, num_v_heads, head_dim_k, head_dim_v: Hq, Hv, K, V.
        dtype, gate_dtype, beta_dtype: of q/k/v, g, beta.
        initial_state_dtype: None when there is no initial state.
        state_dtype: of the final state.
        scale: of q·k, resolved.
        state_v_first: states are `[N, Hv, V, K]` in memory.
        device: where everything lives.
        derived: what others found out about the problem once (`backend.stages_for`); not part of its value.
    """

    batch: int
    num_tokens: int
    num_seqs: int
    num_k_heads: int
    num_v_heads: int
    head_dim_k: int
    head_dim_v: int
    dtype: torch.dtype
    gate_dtype: torch.dtype
    beta_dtype: torch.dtype
    initial_state_dtype: torch.dtype | None
    state_dtype: torch.dtype
    scale: float
    state_v_first: bool
    device: torch.device
    derived: dict = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def group_size(self) -> int:
        """Value heads per key head."""
        return self.num_v_heads // self.num_k_heads

    @property
    def compute_dtype(self) -> torch.dtype:
        """What is accumulated in, and what g_cumsum, dbeta and dg are handed out in."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def sizes(self) -> tuple:
        """What a cp_cache's states depend on, besides values."""
        heads = self.num_k_heads, self.num_v_heads, self.head_dim_k, self.head_dim_v
        return self.batch, self.num_tokens, self.num_seqs, *heads, self.dtype, self.device

    @classmethod
    def check(
        cls, q, k, v, g, beta, *, scale=None, initial_state=None, cu_seqlens=None, cu_seqlens_cpu=None,
        state_v_first=False, state_dtype=None, chunk_size=None,
    ) -> tuple[Problem, Sequences]:  # fmt: skip
        """Validates one call's tensors. Returns the problem and its sequences.

        Raises:
            ValueError: a shape, dtype, device, head count, head size, number of sequences or states is not supported.
        """
        scale = _as_float("scale", scale)
        if state_dtype is not None and not isinstance(state_dtype, torch.dtype):
            raise ValueError(f"state_dtype must be a torch.dtype, got {state_dtype!r}")
        if chunk_size is not None and not (isinstance(chunk_size, Real) and chunk_size == CHUNK_SIZE):
            raise ValueError(f"chunk_size={chunk_size!r} is not supported; supported: None or {CHUNK_SIZE}")
        tensors = (q, k, v, g, beta, initial_state, cu_seqlens, cu_seqlens_cpu)
        options = (scale, bool(state_v_first), state_dtype)
        try:
            key = (*map(_key, tensors), *options)
            problem = _known.get(key)
        except (TypeError, RuntimeError):  # no tensor, sizes that cannot be hashed, a nested tensor
            key, problem = None, None
        if problem is None:
            problem = cls._of_metas(*map(_Meta.of, tensors), *options)
            if key is not None:
                if len(_known) >= _MAX_KNOWN:
                    _known.clear()
                _known[key] = problem
        seqs = Sequences.build(problem.batch, problem.num_tokens, CHUNK_SIZE, cu_seqlens, cu_seqlens_cpu)
        return problem, seqs

    @classmethod
    def _of_metas(
        cls, q, k, v, g, beta, initial_state, cu_seqlens, cu_seqlens_cpu, scale, state_v_first, state_dtype
    ) -> Problem:
        for name, x in (("q", q), ("k", k), ("v", v)):
            axes = "[B, T, Hv, V]" if name == "v" else "[B, T, Hq, K]"
            _require_tensor(name, x, 4, axes)
        _require_dtype("q", q.dtype, INPUT_DTYPES)
        for name, x in (("k", k), ("v", v)):
            if x.dtype != q.dtype:
                raise ValueError(
                    f"{name} has dtype {_names([x.dtype])} but q has {_names([q.dtype])}; "
                    f"q, k and v must share one dtype of {_names(INPUT_DTYPES)}"
                )
        batch, num_tokens, num_k_heads, head_dim_k = q.shape
        num_v_heads, head_dim_v = v.shape[2], v.shape[3]
        _require_shape("k", k, q.shape, "[B, T, Hq, K] as q's")
        _require_shape("v", v, (batch, num_tokens, num_v_heads, head_dim_v), "[B, T, Hv, V] with q's B and T")
        if num_k_heads < 1 or num_v_heads < 1 or num_v_heads % num_k_heads:
            raise ValueError(f"v has {num_v_heads} heads and q has {num_k_heads}; Hv must be a positive multiple of Hq")
        for name, axis, size in (("q and k", "K", head_dim_k), ("v", "V", head_dim_v)):
            if not 1 <= size <= MAX_HEAD_DIM:
                raise ValueError(f"{name}: head size {axis} = {size} is not supported; supported: 1 to {MAX_HEAD_DIM}")
        small = SMALL_DTYPES + ((torch.float64,) if q.dtype == torch.float64 else ())
        why = "" if q.dtype == torch.float64 else " (float64 only together with float64 q, k, v)"
        for name, x in (("g", g), ("beta", beta)):
            _require_tensor(name, x, 3, "[B, T, Hv]")
            _require_shape(name, x, (batch, num_tokens, num_v_heads), "[B, T, Hv]")
            _require_dtype(name, x.dtype, small, why)
        for name, x in (("k", k), ("v", v), ("g", g), ("beta", beta)):
            if x.device != q.device:
                raise ValueError(f"{name} is on {x.device} but q is on {q.device}; all inputs must share one device")
        if batch * num_tokens >= 2**31:
            raise ValueError(f"q has B * T = {batch * num_tokens} tokens; supported: below 2^31")

        cls.check_cu_seqlens(batch, q.device, cu_seqlens, cu_seqlens_cpu)
        num_seqs = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
        cls._check_state(
            "initial_state", initial_state, num_seqs, q, num_v_heads, head_dim_v, state_v_first, small, why
        )
        default_state = torch.float64 if q.dtype == torch.float64 else torch.float32
        state_dtype = default_state if state_dtype is None else state_dtype
        _require_dtype("state_dtype", state_dtype, small, why)
        if scale is None:
            scale = head_dim_k**-0.5
        return cls(
            batch, num_tokens, num_seqs, num_k_heads, num_v_heads, head_dim_k, head_dim_v,
            q.dtype, g.dtype, beta.dtype, None if initial_state is None else initial_state.dtype, state_dtype,
            scale, state_v_first, q.device,
        )  # fmt: skip

    @staticmethod
    def check_cu_seqlens(batch, device, cu_seqlens, cu_seqlens_cpu=None):
        cu_seqlens, cu_seqlens_cpu = _Meta.of(cu_seqlens), _Meta.of(cu_seqlens_cpu)
        if cu_seqlens is None:
            if cu_seqlens_cpu is not None:
                raise ValueError("cu_seqlens_cpu was given without cu_seqlens; pass the offsets as cu_seqlens too")
            return
        for name, x in (("cu_seqlens", cu_seqlens), ("cu_seqlens_cpu", cu_seqlens_cpu)):
            if x is None:
                continue
            _require_tensor(name, x, 1, "[N + 1]")
            _require_dtype(name, x.dtype, (torch.int32, torch.int64))
            if x.shape[0] < 1:
                raise ValueError(f"{name} must hold N + 1 >= 1 offsets, got shape {_shape(x)}")
            if x.shape != cu_seqlens.shape:
                raise ValueError(f"{name} holds {x.shape[0]} offsets but cu_seqlens holds {cu_seqlens.shape[0]}")
        if cu_seqlens.device not in (device, torch.device("cpu")):
            raise ValueError(f"cu_seqlens is on {cu_seqlens.device}; supported: {device} as q, or the CPU")
        if cu_seqlens_cpu is not None and cu_seqlens_cpu.device.type != "cpu":
            raise ValueError(f"cu_seqlens_cpu is on {cu_seqlens_cpu.device}; it must be on the CPU")
        if batch != 1:
            raise ValueError(f"cu_seqlens needs packed inputs with B = 1, got B = {batch}; flatten q, k, v, g, beta")

    @staticmethod
    def _check_state(name, state, rows, q, num_v_heads, head_dim_v, state_v_first, dtypes, why):
        if state is None:
            return
        head_dim_k = q.shape[3]
        axes = "[N, Hv, V, K]" if state_v_first else "[N, Hv, K, V]"
        inner = (head_dim_v, head_dim_k) if state_v_first else (head_dim_k, head_dim_v)
        _require_tensor(name, state, 4, axes)
        if state.shape[0] != rows:
            raise ValueError(f"{name} has {state.shape[0]} states for N = {rows} sequences; it must be {axes}")
        _require_shape(name, state, (rows, num_v_heads, *inner), axes)
        _require_dtype(name, state.dtype, dtypes, why)
        if state.device != q.device:
            raise ValueError(f"{name} is on {state.device} but q is on {q.device}; all inputs must share one device")

    def check_like(self, name: str, x, like: str) -> None:
        """Checks a tensor that must look like v in q's dtype (`out`, `do`) or like the final state (`dht`)."""
        x = _Meta.of(x)
        if like == "o":
            _require_tensor(name, x, 4, "[B, T, Hv, V]")
            _require_shape(
                name, x, (self.batch, self.num_tokens, self.num_v_heads, self.head_dim_v), "[B, T, Hv, V] as v's"
            )
            _require_dtype(name, x.dtype, (self.dtype,), " (q's dtype)")
        else:
            inner = (self.head_dim_v, self.head_dim_k) if self.state_v_first else (self.head_dim_k, self.head_dim_v)
            axes = "[N, Hv, V, K]" if self.state_v_first else "[N, Hv, K, V]"
            _require_tensor(name, x, 4, axes)
            _require_shape(name, x, (self.num_seqs, self.num_v_heads, *inner), axes)
            _require_dtype(name, x.dtype, SMALL_DTYPES + (torch.float64,))
        if x.device != self.device:
            raise ValueError(f"{name} is on {x.device} but q is on {self.device}; all inputs must share one device")

    def check_out(self, out, **inputs) -> None:
        """Checks the tensor that o is written into: o's form, and memory that neither it nor an input uses twice."""
        self.check_like("out", out, "o")
        if out.requires_grad and torch.is_grad_enabled():
            raise ValueError("out requires gradients, and o is written into it without any; pass out.detach()")
        if out.is_inference() and not torch.is_inference_mode_enabled():
            raise ValueError("out was made in inference mode, and may be written to only there; pass another")
        if _overlaps_itself(out):
            raise ValueError(f"out has strides {out.stride()}: its elements share memory; pass a tensor of its own")
        for name, x in inputs.items():
            if x is not None and _overlap(out, x):
                raise ValueError(f"out shares memory with {name}, which is read after out is written; pass another")

    def check_inverse(self, g_cumsum, T_inv) -> None:
        """Checks the forward's g_cumsum and A, as the low-level functions take them back."""
        T_inv = _Meta.of(T_inv)
        _require_tensor("A", T_inv, 4, "[B, T, Hv, C]")
        if T_inv.shape[-1] != CHUNK_SIZE:
            raise ValueError(f"A has chunk size C = {T_inv.shape[-1]}; supported: {CHUNK_SIZE}")
        expected = (self.batch, self.num_tokens, self.num_v_heads, CHUNK_SIZE)
        _require_shape("A", T_inv, expected, "[B, T, Hv, C]")
        _require_dtype("A", T_inv.dtype, (self.dtype,), " (k's dtype)")
        _require_dtype("g (the forward's g_cumsum)", g_cumsum.dtype, (self.compute_dtype,))
        if T_inv.device != self.device:
            raise ValueError(f"A is on {T_inv.device} but q is on {self.device}; all inputs must share one device")

    def empty_state(self, dtype: torch.dtype, *rows: int) -> torch.Tensor:
        """Allocates states `[*rows, Hv, K, V]`, or `[*rows, Hv, V, K]` with state_v_first, in the caller's layout."""
        inner = (self.head_dim_v, self.head_dim_k) if self.state_v_first else (self.head_dim_k, self.head_dim_v)
        return torch.empty((*rows, self.num_v_heads, *inner), dtype=dtype, device=self.device)

    def k_first(self, state: torch.Tensor | None) -> torch.Tensor | None:
        """Returns a logical `[..., K, V]` view of a state in the caller's layout: layouts differ in strides only."""
        return state.transpose(-1, -2) if self.state_v_first and state is not None else state


# Problems by the metadata that they were validated from: a request pattern has few. Errors are not kept.
_known: dict[tuple, Problem] = {}
_MAX_KNOWN = 4096


def _key(x):
    """What of a tensor validation depends on. Raises TypeError for anything else."""
    if x is None:
        return None
    if not isinstance(x, torch.Tensor):
        raise TypeError
    return x.shape, x.dtype, x.device, x.layout, x.is_neg()


_OF_NO_ROWS = ("initial_state", "dht", "A_log", "dt_bias")


def check_values(seqs: Sequences, **tensors) -> None:
    """FLASH_QLA_DEBUG=1: reads cu_seqlens and the inputs. Raises ValueError naming the argument and what is wrong.

    NaN is looked for where the operator reads: not in the rows of no sequence.
    """
    for name in ("cu_seqlens", "cu_seqlens_cpu"):
        source = getattr(seqs, name)
        if source is None:
            continue
        cu = source.tolist()
        if cu[0] != 0:
            raise ValueError(f"{name} must start at 0, got {name}[0] = {cu[0]}")
        for n, (start, end) in enumerate(zip(cu, cu[1:])):
            if end < start:
                raise ValueError(f"{name} must never fall, got {name}[{n}:{n + 2}] = [{start}, {end}]")
        if cu[-1] > seqs.num_tokens:
            raise ValueError(f"{name}[-1] = {cu[-1]} exceeds T = {seqs.num_tokens}")
    if seqs.cu_seqlens is not None and seqs.cu_seqlens_cpu is not None:
        if seqs.cu_seqlens.tolist() != seqs.cu_seqlens_cpu.tolist():
            raise ValueError("cu_seqlens_cpu differs from cu_seqlens; both must hold the same offsets")
    end = int(seqs.cu_seqlens[-1]) if seqs.is_varlen else seqs.num_tokens
    for name, x in tensors.items():
        if x is not None and name not in _OF_NO_ROWS:
            x = x[:, :end]
        if x is not None and bool(torch.isnan(x).any()):
            raise ValueError(f"{name} holds NaN ({int(torch.isnan(x).sum())} of {x.numel()} values)")
