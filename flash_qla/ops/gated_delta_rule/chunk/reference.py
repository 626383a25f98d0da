"""The gated delta rule in plain PyTorch: any device, any float dtype, any head size.

`recurrence` is the ground truth: token by token, float64, differentiable by autograd. The other functions are the
chunked algorithm as stages, with the signatures of the kernels' stages (destinations first), written from the
equations of `ops/gated_delta_rule/README.md`; only the walk over a sequence's chunks is serial, and it takes all
sequences at once.

Stages compute in float64 for float64 inputs and in float32 otherwise, gates aside (`gate_dtype`). States are
`[N, Hv, K, V]` logically; the caller hands in strided views when the memory is V-first. No stage tracks gradients and
none obeys autocast.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch.utils.checkpoint import checkpoint

from flash_qla.ops.gated_delta_rule.chunk.constants import GATE_FLOOR
from flash_qla.ops.gated_delta_rule.chunk.sequences import Sequences
from flash_qla.utils.l2norm import l2norm_bwd, l2norm_fwd

# Elements of one intermediate `[chunks, Hv, C, max(K, V)]`: bounds the memory of long inputs, and fits a CPU's cache.
BLOCK_ELEMENTS = 1 << 21
# Tokens between the states that autograd keeps in `recurrence`; the ones between are computed again.
CHECKPOINT_TOKENS = 32


def recurrence(q, k, v, g, beta, scale, initial_state, seqs: Sequences):
    """Runs the rule token by token in float64. Equation: R1.

    Args:
        q, k: `[B, T, Hq, K]`.
        v: `[B, T, Hv, V]`.
        g: `[B, T, Hv]` raw natural-log gate, clamped at GATE_FLOOR here.
        beta: `[B, T, Hv]`.
        scale: factor of q.
        initial_state: `[N, Hv, K, V]` or None for zeros.
        seqs: the sequences inside `[B, T]`.

    Returns:
        o float64 `[B, T, Hv, V]` (zero in rows of no sequence) and the final state float64 `[N, Hv, K, V]`.
    """
    num_v_heads, device = v.shape[2], v.device
    group = num_v_heads // max(q.shape[2], 1)
    bounds = seqs.bounds()
    longest = max((e - s for s, e in bounds), default=0)
    steps = torch.arange(longest, device="cpu")
    rows = torch.tensor(bounds, dtype=torch.int64, device="cpu").view(-1, 2)
    rows = torch.where(rows[:, :1] + steps < rows[:, 1:], rows[:, :1] + steps, -1).to(device)

    def padded(x):
        # Rows past a sequence's end are zero: g = beta = 0 leaves the state alone, exactly.
        x = x.double().flatten(0, 1)
        inside = (rows >= 0).view(*rows.shape, *[1] * (x.dim() - 1))
        return torch.where(inside, x[rows.clamp(min=0)], 0.0)

    inputs = [padded(x) for x in (q, k, v, g.double().clamp(min=GATE_FLOOR), beta)]
    inputs[0], inputs[1] = (x.repeat_interleave(group, dim=2) for x in inputs[:2])
    if initial_state is None:
        state = inputs[2].new_zeros(seqs.num_seqs, num_v_heads, k.shape[-1], v.shape[-1])
    else:
        state = initial_state.double().clone()

    def run(state, q, k, v, g, beta):
        outputs = []
        for t in range(q.shape[1]):
            state = state * g[:, t].exp()[..., None, None]
            read = torch.einsum("nhk,nhkv->nhv", k[:, t], state)
            write = beta[:, t, :, None] * (v[:, t] - read)
            state = state + k[:, t, :, :, None] * write[:, :, None, :]
            outputs.append(scale * torch.einsum("nhk,nhkv->nhv", q[:, t], state))
        return state, torch.stack(outputs, 1)

    tracked = torch.is_grad_enabled() and any(x.requires_grad for x in (*inputs, state))
    outputs = []
    for start in range(0, longest, CHECKPOINT_TOKENS):
        block = [x[:, start : start + CHECKPOINT_TOKENS] for x in inputs]
        state, out = checkpoint(run, state, *block, use_reentrant=False) if tracked else run(state, *block)
        outputs.append(out)
    o = inputs[2].new_zeros(seqs.flat_tokens, num_v_heads, v.shape[-1])
    per_seq = torch.cat(outputs, 1) if outputs else inputs[2]
    o = o.index_put((rows[rows >= 0],), per_seq[rows >= 0])
    return o.view(seqs.batch, seqs.num_tokens, num_v_heads, v.shape[-1]), state


def compute_dtype(*tensors) -> torch.dtype:
    """The dtype that stages compute in: float64 as soon as one input is, float32 otherwise."""
    return torch.float64 if any(x is not None and x.dtype == torch.float64 for x in tensors) else torch.float32


def gate_dtype(k) -> torch.dtype:
    """The dtype that gates are summed in, and differences of the sums taken: float64 for float32 keys too.

    Each reset adds -100 to its chunk's sum, down to -6400, where float32 is 2.4e-4 off: every decay would be. Beside
    the roundings of 16-bit inputs that is nothing, and there the kernels, which sum in float32, are to be compared.
    """
    return torch.float64 if k.dtype in (torch.float32, torch.float64) else torch.float32


class Chunks:
    """Some chunks of the flat rows: gathers `[B, T, H, ...]` into `[n, H, C, ...]` and scatters back.

    Padding must not be read, not even times zero: NaN in a neighbouring sequence would leak through it.
    """

    def __init__(self, rows: torch.Tensor, num_tokens: int, dtype: torch.dtype):
        self.valid = rows >= 0
        self.index = rows.clamp(min=0).flatten()
        self.last_index = torch.where(self.valid, rows, rows.amax(-1, keepdim=True)).flatten()
        written = rows[self.valid]
        self.written = (written // max(num_tokens, 1), written % max(num_tokens, 1))
        self.shape, self.dtype = rows.shape, dtype

    def take(self, x, num_heads=None):
        """Returns `[n, H, C, ...]`, zero past the chunk's end; heads repeated up to num_heads if given."""
        out = x.flatten(0, 1).index_select(0, self.index).to(self.dtype)
        out = out.view(*self.shape, *x.shape[2:])
        out.masked_fill_(~self.valid.view(*self.shape, *[1] * (x.dim() - 2)), 0)
        out = out.transpose(1, 2)
        if num_heads is not None and num_heads != x.shape[2]:
            return out.repeat_interleave(num_heads // x.shape[2], dim=1)
        return out.contiguous()

    def take_gate(self, g):
        """Returns the cumulative gate `[n, Hv, C]`, the last valid row's value past the chunk's end.

        In the wider of g's and the compute dtype: only differences may be rounded to the latter.
        """
        out = g.flatten(0, 1).index_select(0, self.last_index).to(torch.promote_types(g.dtype, self.dtype))
        return out.view(*self.shape, -1).transpose(1, 2).contiguous()

    def put(self, dest, x):
        """Writes `[n, H, C, ...]` into the rows of dest `[B, T, H, ...]`, whatever its strides."""
        dest[self.written] = x.transpose(1, 2)[self.valid].to(dest.dtype)


def chunk_blocks(seqs, device, dtype, num_heads, head_dim) -> Iterator[tuple[slice, Chunks]]:
    rows = seqs.chunk_rows(device)
    size = max(1, BLOCK_ELEMENTS // max(1, num_heads * seqs.chunk_size * head_dim))
    for start in range(0, rows.shape[0], size):
        block = slice(start, min(start + size, rows.shape[0]))
        yield block, Chunks(rows[block], seqs.num_tokens, dtype)


def _seq_groups(seqs, num_heads, head_dims) -> Iterator[list[int]]:
    """Sequences by falling chunk count, so that the ones still running are a prefix, in groups of bounded memory."""
    counts = seqs.num_chunks()
    order = sorted(range(seqs.num_seqs), key=lambda n: -counts[n])
    size = max(
        1, BLOCK_ELEMENTS // max(1, num_heads * max(seqs.chunk_size * max(head_dims), head_dims[0] * head_dims[1]))
    )
    for start in range(0, len(order), size):
        yield order[start : start + size]


def _walk(seqs, group, device, reverse=False) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields (number of running sequences, their chunk numbers) per step."""
    counts, first = seqs.num_chunks(), seqs.first_chunks()
    for step in range(counts[group[0]]):
        running = [n for n in group if counts[n] > step]
        chunks = [first[n] + (counts[n] - 1 - step if reverse else step) for n in running]
        yield len(running), torch.tensor(chunks, dtype=torch.int64, device=device)


def chunk_slots(seqs, device):
    """Returns int64 `[total_chunks]`: the slot of each chunk."""
    first = seqs.first_slots()
    return torch.tensor([first[n] + c for n, c in seqs.chunk_seq()], dtype=torch.int64, device=device)


def _load_states(h, group, shape, dtype, device):
    if h is None:
        return torch.zeros(len(group), *shape, dtype=dtype, device=device)
    # Contiguous whatever the layout in memory, so that V-first and K-first results are the same bits.
    return h[group].to(dtype).contiguous()


def stage(function):
    """A stage is exact arithmetic on plain tensors: no gradient tracking, no autocast."""

    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        device = next(x.device.type for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))
        with torch.no_grad(), torch.autocast(device, enabled=False):
            return function(*args, **kwargs)

    return wrapped


def _decays(g, dtype):
    """Returns Γ `[n, H, C, 1]`, e `[n, H, C, 1]` and exp(g_C) `[n, H, 1, 1]` from the cumulative gate `[n, H, C]`."""
    last = g[..., -1:]
    return tuple(x.to(dtype).exp().unsqueeze(-1) for x in (g, last - g, last))


def _decay_matrix(g, dtype):
    """Returns D `[n, H, C, C]`: exp(g_i - g_j) on and below the diagonal, 0 above, where the exponent may overflow."""
    chunk_size = g.shape[-1]
    upper = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=g.device).triu(1)
    return (g.unsqueeze(-1) - g.unsqueeze(-2)).to(dtype).masked_fill_(upper, -torch.inf).exp_()


def _repeat(x, num_heads):
    return x if x.shape[1] == num_heads else x.repeat_interleave(num_heads // x.shape[1], dim=1)


def _sum_groups(x, num_heads):
    return x if x.shape[1] == num_heads else x.unflatten(1, (num_heads, -1)).sum(2)


def _walk_forward(o, ht, h, slots, q, k, v, T_inv, g_cumsum, beta, scale, h0, seqs):
    """The forward walk; chunk i's entering state goes to h[slots[i]], or to h[i] without slots."""
    dtype, device = compute_dtype(k, v), k.device
    num_v_heads, head_dims = v.shape[2], (k.shape[-1], v.shape[-1])
    all_rows = seqs.chunk_rows(device)
    if o is not None and seqs.is_varlen:
        o.zero_()
    for group in _seq_groups(seqs, num_v_heads, head_dims):
        state = _load_states(h0, group, (num_v_heads, *head_dims), dtype, device)
        for running, chunks in _walk(seqs, group, device):
            rows, S = Chunks(all_rows[chunks], seqs.num_tokens, dtype), state[:running]
            if h is not None:
                h[chunks if slots is None else slots[chunks]] = S.to(h.dtype)
            keys, g = rows.take(k, num_v_heads), rows.take_gate(g_cumsum)
            gamma, e, total = _decays(g, dtype)
            W = rows.take(beta).unsqueeze(-1) * (rows.take(v) - gamma * (keys @ S))  # F3, F4
            Vd = rows.take(T_inv) @ W  # F5
            if o is not None:
                queries = rows.take(q)
                P = _repeat(queries @ rows.take(k).mT, num_v_heads) * _decay_matrix(g, dtype)  # F6
                rows.put(o, scale * (gamma * (_repeat(queries, num_v_heads) @ S) + P @ Vd))  # F7
            state[:running] = total * S + keys.mT @ (e * Vd)  # F8
        if ht is not None:
            ht[group] = state.to(ht.dtype)


@stage
def cumsum(g, seqs: Sequences, reverse: bool = False):
    """Sums g over the tokens of each chunk, from its start or, reversed, from its end. Equation: F1.

    Args:
        g: `[B, T, H]`.

    Returns:
        `[B, T, H]` float32 (float64 for float64 g), zero in rows of no sequence.
    """
    dtype = compute_dtype(g)
    out = torch.zeros(g.shape, dtype=dtype, device=g.device)
    for _, rows in chunk_blocks(seqs, g.device, dtype, g.shape[2], 1):
        x = rows.take(g)
        rows.put(out, x.flip(-1).cumsum(-1).flip(-1) if reverse else x.cumsum(-1))
    return out


def normalize(q, k, eps: float):
    """L2-normalises q and k per head. Equation: N1.

    Returns:
        y_q, y_k in their inputs' dtype, and rstd_q, rstd_k `[B, T, Hq]` in the compute dtype.
    """
    (yq, rstd_q), (yk, rstd_k) = l2norm_fwd(q, eps), l2norm_fwd(k, eps)
    return yq, yk, rstd_q, rstd_k


def normalize_backward(dyq, dyk, yq, yk, rstd_q, rstd_k):
    """Gradients of `normalize`: dq, dk. Equation: N2."""
    return l2norm_bwd(yq, rstd_q, dyq), l2norm_bwd(yk, rstd_k, dyk)


@stage
def solve(k, g, beta, seqs: Sequences, ready: bool = False):
    """Sums the gates and inverts the chunks' triangular matrices. Equations: F0 to F2.

    Args:
        k: `[B, T, Hq, K]`.
        g: `[B, T, Hv]` raw natural-log gate.
        beta: `[B, T, Hv]`.
        ready: T_inv is for `entering_states` and `fused_forward` alone, which are told so too: kernels make something
            that is cheaper to use.

    Returns:
        g_cumsum `[B, T, Hv]` in `gate_dtype`, and T_inv `[B, T, Hv, C]` in k's dtype: row t is
        token t's row of its chunk's inverse, zero in columns past the chunk's end. Rows of no sequence are zero.
    """
    g_cumsum = cumsum(g.to(gate_dtype(k)).clamp(min=GATE_FLOOR), seqs)
    return g_cumsum, invert(k, g_cumsum, beta, seqs)


@stage
def invert(k, g_cumsum, beta, seqs: Sequences):
    """The inverse alone. Equation: F2. Without a gate (g_cumsum None) it is the plain delta rule's.

    Returns:
        T_inv `[B, T, Hv, C]` as `solve`.
    """
    dtype, num_v_heads = compute_dtype(k), beta.shape[2]
    T_inv = torch.zeros(*beta.shape, seqs.chunk_size, dtype=k.dtype, device=k.device)
    eye = torch.eye(seqs.chunk_size, dtype=dtype, device=k.device)
    for _, rows in chunk_blocks(seqs, k.device, dtype, num_v_heads, max(k.shape[-1], seqs.chunk_size)):
        keys = rows.take(k)
        L = _repeat(keys @ keys.mT, num_v_heads) * rows.take(beta).unsqueeze(-1)
        if g_cumsum is not None:
            # Gated before the inversion: the ungated inverse can overflow where the gated one is small.
            L = L * _decay_matrix(rows.take_gate(g_cumsum), dtype)
        rows.put(T_inv, torch.linalg.solve_triangular(L, eye.expand_as(L), upper=False, unitriangular=True))
    return T_inv


@stage
def fused_forward(o, ht, h, q, k, v, T_inv, g_cumsum, beta, scale, h0, seqs: Sequences):
    """Walks the chunks: outputs, final state, and on request the state entering each chunk. Equations: F3 to F8.

    Args:
        o: `[B, T, Hv, V]` destination or None; rows of no sequence become zero.
        ht: `[N, Hv, K, V]` destination of the final state or None.
        h: `[total_chunks, Hv, K, V]` destination of the states entering the chunks, in order, or None.
        q, k: `[B, T, Hq, K]`; q may be None when o is.
        v: `[B, T, Hv, V]`.
        T_inv, g_cumsum: from `solve`.
        beta: `[B, T, Hv]`.
        scale: factor of q.
        h0: `[N, Hv, K, V]` or None for zeros.
    """
    _walk_forward(o, ht, h, None, q, k, v, T_inv, g_cumsum, beta, scale, h0, seqs)


def solve_and_walk(o, ht, h, q, k, v, g, beta, scale, h0, seqs: Sequences, keep_inverse=True):
    """`solve`, then `fused_forward`: one stage because kernels may overlap the two. Returns what `solve` does.

    keep_inverse: False if nobody reads T_inv afterwards; None is returned instead of it, and kernels solve `ready`.
    """
    g_cumsum, T_inv = solve(k, g, beta, seqs)
    fused_forward(o, ht, h, q, k, v, T_inv, g_cumsum, beta, scale, h0, seqs)
    return g_cumsum, T_inv if keep_inverse else None


@stage
def forward_states(k, v, T_inv, g_cumsum, beta, h0, seqs: Sequences):
    """Computes the state entering every chunk for the backward. Equations: F3 to F5, F8.

    Returns:
        S `[slots, Hv, K, V]` in the compute dtype, numbered as `Sequences` numbers chunk slots.
    """
    shape = (seqs.max_slots, v.shape[2], k.shape[-1], v.shape[-1])
    S = torch.zeros(shape, dtype=compute_dtype(k, v), device=k.device)
    slots = chunk_slots(seqs, k.device)
    _walk_forward(None, None, S, slots, None, k, v, T_inv, g_cumsum, beta, 1.0, h0, seqs)
    return S


@stage
def reverse_states(q, k, T_inv, g_cumsum, beta, do, dht, scale, dh0, seqs: Sequences):
    """Walks the chunks backwards: the cotangent of the state leaving every chunk. Equations: B1, B2, B4.

    Args:
        do: `[B, T, Hv, V]` cotangent of o.
        dht: `[N, Hv, K, V]` cotangent of the final state or None for zeros.
        dh0: `[N, Hv, K, V]` destination of the initial state's gradient or None.

    Returns:
        dS `[slots, Hv, K, V]` in the compute dtype, numbered as `Sequences` numbers chunk slots.
    """
    dtype, device = compute_dtype(k, do), k.device
    num_v_heads, head_dims = do.shape[2], (k.shape[-1], do.shape[-1])
    all_rows, slots = seqs.chunk_rows(device), chunk_slots(seqs, device)
    dS_out = torch.zeros(seqs.max_slots, num_v_heads, *head_dims, dtype=dtype, device=device)
    for group in _seq_groups(seqs, num_v_heads, head_dims):
        state = _load_states(dht, group, (num_v_heads, *head_dims), dtype, device)
        for running, chunks in _walk(seqs, group, device, reverse=True):
            rows, dS = Chunks(all_rows[chunks], seqs.num_tokens, dtype), state[:running]
            dS_out[slots[chunks]] = dS
            queries, keys, dO, g = rows.take(q), rows.take(k), rows.take(do), rows.take_gate(g_cumsum)
            gamma, e, total = _decays(g, dtype)
            P = scale * _repeat(queries @ keys.mT, num_v_heads) * _decay_matrix(g, dtype)
            queries, keys = _repeat(queries, num_v_heads), _repeat(keys, num_v_heads)
            dVd = P.mT @ dO + e * (keys @ dS)  # B1
            dR = rows.take(beta).unsqueeze(-1) * (rows.take(T_inv).mT @ dVd)  # B2
            state[:running] = total * dS + scale * (queries.mT @ (gamma * dO)) - keys.mT @ (gamma * dR)  # B4
        if dh0 is not None:
            dh0[group] = state.to(dh0.dtype)
    return dS_out


def backward_states(q, k, v, T_inv, g_cumsum, beta, do, scale, h0, dht, dh0, seqs: Sequences, dv=None):
    """Both recurrences of the backward: (S, dS) as `forward_states` and `reverse_states` return them; writes dh0.

    dv: where `gradients` will write v's gradient, for stages that have a use for its memory; this one has none.
    """
    S = forward_states(k, v, T_inv, g_cumsum, beta, h0, seqs)
    return S, reverse_states(q, k, T_inv, g_cumsum, beta, do, dht, scale, dh0, seqs)


@stage
def gradients(dq, dk, dv, dbeta, dg, q, k, v, T_inv, g_cumsum, beta, do, scale, S, dS, seqs: Sequences):
    """Computes the inputs' gradients, chunk by chunk, from the states on both sides. Equations: B1 to B11.

    Args:
        dq, dk: `[B, T, Hq, K]` destinations, summed over each key head's value heads.
        dv: `[B, T, Hv, V]` destination.
        dbeta: `[B, T, Hv]` destination.
        dg: `[B, T, Hv]` destination: gradient of the raw gate as clamped (who clamps zeroes it below GATE_FLOOR).
        S, dS: `[slots, Hv, K, V]` from `forward_states` and `reverse_states`.

    Any destination may be None. Rows of no sequence become zero.
    """
    if all(x is None for x in (dq, dk, dv, dbeta, dg)):
        return
    dtype, device = compute_dtype(k, v), k.device
    num_k_heads, num_v_heads = k.shape[2], v.shape[2]
    widest = max(k.shape[-1], v.shape[-1], seqs.chunk_size)
    slots = chunk_slots(seqs, device)
    if seqs.is_varlen:
        for dest in (dq, dk, dv, dbeta, dg):
            if dest is not None:
                dest.zero_()
    for block, rows in chunk_blocks(seqs, device, dtype, num_v_heads, widest):
        S_in, dS_out = S[slots[block]].to(dtype), dS[slots[block]].to(dtype)
        queries, keys, dO, b = rows.take(q), rows.take(k), rows.take(do), rows.take(beta).unsqueeze(-1)
        g, T = rows.take_gate(g_cumsum), rows.take(T_inv)
        (gamma, e, total), D = _decays(g, dtype), _decay_matrix(g, dtype)
        QK, KK = _repeat(queries @ keys.mT, num_v_heads), _repeat(keys @ keys.mT, num_v_heads)
        queries, keys = _repeat(queries, num_v_heads), _repeat(keys, num_v_heads)

        dVd = (scale * D * QK).mT @ dO + e * (keys @ dS_out)  # B1
        X = T.mT @ dVd  # B2
        dR = b * X
        if dv is not None:
            rows.put(dv, dR)  # B3
        if dq is None and dk is None and dbeta is None and dg is None:
            continue
        R = rows.take(v) - gamma * (keys @ S_in)
        Vd = T @ (b * R)
        dPg = scale * (dO @ Vd.mT) * D  # B5
        dM = -(X @ Vd.mT).mul_(D).tril_(-1)  # B6
        if dbeta is not None:
            rows.put(dbeta, (X * R).sum(-1) + (dM * KK).sum(-1))  # B9
        dM *= b
        dQ_state = scale * gamma * (dO @ S_in.mT) if dq is not None or dg is not None else None
        dK_state = -gamma * (dR @ S_in.mT) if dk is not None or dg is not None else None
        dK_end = e * (Vd @ dS_out.mT) if dk is not None or dg is not None else None
        if dq is not None:
            rows.put(dq, _sum_groups(dQ_state + dPg @ keys, num_k_heads))  # B7
        if dk is not None:
            rows.put(dk, _sum_groups(dK_state + dK_end + dPg.mT @ queries + (dM + dM.mT) @ keys, num_k_heads))  # B8
        if dg is not None:
            pair = (dPg * QK).tril_(-1) + dM * KK
            from_states = (queries * dQ_state + keys * dK_state).sum(-1)
            x = (keys * dK_end).sum(-1)  # B10
            last = (rows.valid.sum(-1) - 1).view(-1, 1, 1).expand(-1, num_v_heads, 1)
            x = x.scatter(-1, last, 0.0)
            dg_cumsum = from_states + pair.sum(-1) - pair.sum(-2) - x
            at_end = x.sum(-1, keepdim=True) + total.squeeze(-1) * (S_in * dS_out).sum((-1, -2)).unsqueeze(-1)
            dg_cumsum = dg_cumsum.scatter_add(-1, last, at_end)
            rows.put(dg, dg_cumsum.flip(-1).cumsum(-1).flip(-1))  # B11
