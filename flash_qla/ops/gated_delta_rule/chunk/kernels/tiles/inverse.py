"""Inverse of a 64 x 64 unit lower triangular matrix inside one warp, to 2^-17.

The matrix is a 4 x 4 grid of 16 x 16 blocks. A block lives in registers in the *accumulator layout* of `mma.m16n8k16`:
lane = 4 u + w holds

    block[4 s + 2 r + p] = element (u + 8 r, 2 w + p + 8 s)          r, s, p in {0, 1}

Packed in pairs, an accumulator is a left operand (pairs in the order 2 s + r) and, transposed, a right operand
(2 r + s) as it stands. So `add_product` computes D += A Bᵀ from accumulators, without a shuffle or a trip through
shared memory, and the inverse is written with that product alone, mixing blocks and transposed blocks.

With N = -L (no sign is left anywhere), X = (I - N)^-1, G = K Kᵀ and N_ab = r_a G_ab c_b for diagonal matrices r_a
(-beta and the decay from the first row of block a) and c_b (the decay to the first row of block b + 1); f is the decay
from the first row of block 1 to that of block 2:

    8 x 8 diagonal blocks   by substitution in fp32, two columns a lane, from Nᵀ in shared memory
    8 -> 16                 Yᵀ = X0ᵀ N10ᵀ, X10 = X1 Y, X10ᵀ = Yᵀ X1ᵀ for two diagonal blocks in one product
    16 -> 32                Y10ᵀ = (X00ᵀ c0) G10ᵀ r1, X10ᵀ = Y10ᵀ X11ᵀ     Y32ᵀ = (X22ᵀ c2) G32ᵀ r3, X32 = X33 Y32
    32 -> 64                Ya0ᵀ = (f (X00ᵀ c0) Ga0ᵀ + (X10ᵀ c1) Ga1ᵀ) ra, Ya1ᵀ = (X11ᵀ c1) Ga1ᵀ ra, a = 2, 3 (r3 from
                            row 32 here);  [X2b; X3b] = [X22 0; X32 X33] [Y2b; Y3b], b = 0, 1

so the blocks of G are operands as they come, split once for all value heads of a key head, and gates are factors of
the columns of accumulators. Where gates fall every factor is at most 1.

For the forward walk ("ready") the result is Z = -X beta instead. With D = diag(beta), Γ = diag(e^g) and P = Γ G Γ^-1
(strictly lower), Z = -(D^-1 + P)^-1 without any division: diagonal blocks start from -beta instead of 1 and then
Z_ab = Z_aa P_ab Z_bb and so on, the same products with r and n10 free of beta. And Γ^-1 Z Γ is the same with P = G: no
gate at all. That is what a mild chunk gets (WarpSolve.plain): no factors, no exponentials.

Tensor cores multiply operands split into two bf16 terms (high x high + high x low + low x high, fp32 accumulation):
the error is 2^-17 with fp32's range, so that also inverses whose entries cancel or grow (keys that are not normalised)
end at the rounding of the result. One tf32 term leaves 2^-11, which then shows; three are as good as fp32 and need
twice the tensor core time. The CUDA functions are in inverse_source.py.
"""

from dataclasses import dataclass

import tilelang.language as T

BLOCK = 16
PER_LANE = 8
# K Kᵀ: six blocks below the diagonal of 256 words, four on it without their upper right quarters.
KEYS_WORDS = 6 * 256 + 4 * 192
# fp32 words of shared memory a warp needs: the result's lower half, 32 rows of 128 bytes, and from UPPER on the left
# half of its upper half, 32 rows of 64 bytes; each under the swizzle of its width.
SCRATCH, UPPER = 1536, 1024
# Row and block strides (words) of the scratch's two earlier contents, 8 x 8 blocks; free of bank conflicts.
N_ROW, N_BLOCK = 8, 68
X_ROW, X_BLOCK = 12, 100
# WarpSolve.gates: pairs (g, -beta) of the 64 rows, g the log2 cumulative gate. WarpSolve.factors: c and r.
GATES_WORDS = 128
COLUMN_FACTOR, ROW_FACTOR, FACTORS_WORDS = 0, 32, 96  # of rows 0 to 47, 16 to 63
UPPER_ZEROS, LOWER_ZEROS = ((0, 1),), ((2, 3),)  # blocks above the diagonal


@dataclass(frozen=True)
class WarpSolve:
    """What one warp inverts from and in. All in shared memory, fp32, one-dimensional; offsets in words.

    Attributes:
        scratch, base: SCRATCH words, the warp's own, at scratch[base]; afterwards they hold the result's tile. The
            blocks UPPER_ZEROS of the tile are never written: the caller zeroes them once (`store_zeros`).
        keys, first_key: K Kᵀ, KEYS_WORDS lower blocks by `store_keys`; several warps may share them.
        gates, first_gate: GATES_WORDS words, set by the caller.
        factors, first_factor: FACTORS_WORDS words, the warp's own.
        minus: `minus_one()`.
        plain: static; gates holds the 64 -beta and the result is Γ^-1 Z Γ.
        ready: run time, where not plain: the result is Z, not X.
    """

    scratch: object
    base: object
    keys: object
    first_key: object
    gates: object
    first_gate: object
    factors: object
    first_factor: object
    minus: object
    plain: bool
    ready: object


def minus_one():
    """Expression: what the splits of this file subtract with; a register of the lane."""
    return T.call_extern("int32", "(int)flash_qla::minus_one")


def store_keys(keys, first_key, product, minus):
    """Call expression: the warpgroup's K Kᵀ into keys[first_key:]: blocks row by row, 256 words each."""
    return T.call_extern(
        "handle", "flash_qla::store_keys", T.address_of(keys[first_key]), product.access_ptr("r"), minus
    )


def _locals(count, size=PER_LANE, dtype="float32"):
    return [T.alloc_local((size,), dtype) for _ in range(count)]


# ---- products of blocks


@dataclass(frozen=True)
class Operand:
    """A block as two bf16 terms, packed in pairs. One quad of registers each: build it once, use it often."""

    high: object
    low: object


def _operands(count):
    return [Operand(*_locals(2, 4, "int32")) for _ in range(count)]


def split(w, operand, block, right):
    """Call expression: operand = block (accumulator layout) as a left operand, or its transpose as a right one."""
    name = "flash_qla::split_right" if right else "flash_qla::split_left"
    return T.call_extern(
        "handle", name, T.address_of(operand.high[0]), T.address_of(operand.low[0]), T.address_of(block[0]), w.minus
    )


def add_product(acc, left, right):
    """Call expression: acc += left rightᵀ in accumulator layout."""
    terms = [T.address_of(x[0]) for x in (left.high, left.low, right.high, right.low)]
    return T.call_extern("handle", "flash_qla::add_product", T.address_of(acc[0]), *terms)


@T.macro
def set_product(acc, left, right):
    for i in T.unroll(PER_LANE):
        acc[i] = 0.0
    add_product(acc, left, right)


# ---- rows and gated blocks


def diagonal_word(a):
    """First word of G_aa in keys."""
    return 6 * 256 + a * 192


@T.macro
def fill_factors(w, lane):
    """Fills w.factors from w.gates. c of block 3 is never read."""
    pairs, out = _locals(1, 4)[0], _locals(1, 2)[0]
    first = T.alloc_var("float32")
    following = T.alloc_var("float32")
    for v in T.vectorized(4):
        pairs[v] = w.gates[w.first_gate + 4 * lane + v]
    first = w.gates[w.first_gate + 2 * BLOCK * (lane // 8)]
    following = w.gates[w.first_gate + 2 * BLOCK * ((lane // 8 + 1) % 4)]
    for r in T.unroll(2):
        out[r] = T.exp2(following - pairs[2 * r])
    if lane < 24:
        for r in T.vectorized(2):
            w.factors[w.first_factor + COLUMN_FACTOR + 2 * lane + r] = out[r]
    for r in T.unroll(2):
        out[r] = T.if_then_else(w.ready != 0, 1.0, pairs[2 * r + 1]) * T.exp2(pairs[2 * r] - first)
    if lane >= 8:
        for r in T.vectorized(2):
            w.factors[w.first_factor + ROW_FACTOR + 2 * lane + r] = out[r]


def step_factor(w, b):
    """Expression: f, the decay from block b's first row to the next block's."""
    return T.exp2(w.gates[w.first_gate + 2 * BLOCK * (b + 1)] - w.gates[w.first_gate + 2 * BLOCK * b])


@T.macro
def load_factors(factors, w, kind, b, lane):
    """factors = those of block b's columns of an accumulator."""
    if not w.plain:
        _load_factors(factors, w, kind, b, lane)


@T.macro
def _load_factors(factors, w, kind, b, lane):
    for s in T.unroll(2):
        for p in T.vectorized(2):
            factors[2 * s + p] = w.factors[w.first_factor + kind + BLOCK * b + 8 * s + lane % 4 * 2 + p]


@T.macro
def scale_columns(w, out, block, factors):
    """out = block, its columns times factors; plain: as they are."""
    if not w.plain:
        _scale_columns(out, block, factors)
    elif out is not block:
        for i in T.unroll(PER_LANE):
            out[i] = block[i]


@T.macro
def _scale_columns(out, block, factors):
    for s in T.unroll(2):
        for r in T.unroll(2):
            for p in T.unroll(2):
                out[4 * s + 2 * r + p] = block[4 * s + 2 * r + p] * factors[2 * s + p]


def load_keys(operand, w, a, b, lane):
    """Call expression: operand = G_ab as a right operand, a > b."""
    block = w.first_key + (a * (a - 1) // 2 + b) * 256
    return T.call_extern(
        "handle", "flash_qla::load_operand", T.address_of(operand.high[0]), T.address_of(operand.low[0]),
        T.address_of(w.keys[block]), lane,
    )  # fmt: skip


@T.macro
def gate_diagonal(n10, w, lane):
    """Of each diagonal block: n10[2 d:] = its lower left 8 x 8 block; Nᵀ of its two diagonal ones to the scratch.

    What lies on and below the diagonal of an Nᵀ (i <= j, exponents above 0) is never read. All loads come first: the
    compiler cannot move them over the stores.
    """
    for half in (0, 1):
        if w.plain:
            _scale_two(n10, w, half, lane)
        else:
            _gate_two(n10, w, half, lane)
        T.sync_warp()  # registers: keeps the second half's loads behind it


@T.macro
def load_diagonal(keys, w, half, lane):
    """keys[8 d:] = the lane's part of the diagonal block 2 half + d."""
    for d in (0, 1):
        for v in T.vectorized(4):
            keys[8 * d + v] = w.keys[w.first_key + diagonal_word(2 * half + d) + lane * 4 + v]
        for v in T.vectorized(2):
            keys[8 * d + 6 + v] = w.keys[w.first_key + (diagonal_word(2 * half + d) + 128) + lane * 2 + v]


@T.macro
def store_transposed(keys, w, half, lane):
    """The blocks Nᵀ of 8 x 8 to the scratch."""
    for d in T.unroll(2):
        for s in T.unroll(2):
            for p in T.vectorized(2):
                w.scratch[w.base + (4 * half + 2 * d + s) * N_BLOCK + lane // 4 * N_ROW + lane % 4 * 2 + p] = keys[
                    8 * d + 6 * s + p
                ]


@T.macro
def _scale_two(n10, w, half, lane):
    """`_gate_two` without gates: n10 from G, Nᵀ with -beta."""
    keys = T.alloc_local((2 * PER_LANE,), "float32")
    col = T.alloc_local((8,), "float32")
    load_diagonal(keys, w, half, lane)
    for d in (0, 1):
        for s in T.unroll(2):
            for v in T.vectorized(2):
                col[4 * d + 2 * s + v] = w.gates[w.first_gate + BLOCK * (2 * half + d) + 8 * s + lane % 4 * 2 + v]
    for d in T.unroll(2):
        for p in T.unroll(2):
            n10[4 * half + 2 * d + p] = keys[8 * d + 2 + p]
        for s in T.unroll(2):
            for p in T.unroll(2):
                keys[8 * d + 6 * s + p] *= col[4 * d + 2 * s + p]
    store_transposed(keys, w, half, lane)


@T.macro
def _gate_two(n10, w, half, lane):
    """Diagonal blocks 2 half and 2 half + 1 of `gate_diagonal`."""
    keys = T.alloc_local((2 * PER_LANE,), "float32")
    col = T.alloc_local((16,), "float32")
    row = T.alloc_local((8,), "float32")
    load_diagonal(keys, w, half, lane)
    for d in (0, 1):
        block = 2 * half + d
        for s in T.unroll(2):
            for v in T.vectorized(4):
                col[8 * d + 4 * s + v] = w.gates[w.first_gate + 2 * BLOCK * block + 16 * s + lane % 4 * 4 + v]
            for v in T.vectorized(2):
                row[4 * d + 2 * s + v] = w.gates[w.first_gate + 2 * BLOCK * block + 16 * s + lane // 4 * 2 + v]
    for d in T.unroll(2):
        for p in T.unroll(2):
            n10[4 * half + 2 * d + p] = (
                keys[8 * d + 2 + p]
                * T.if_then_else(w.ready != 0, 1.0, row[4 * d + 3])
                * T.exp2(row[4 * d + 2] - col[8 * d + 2 * p])
            )
        for s in T.unroll(2):
            for p in T.unroll(2):
                keys[8 * d + 6 * s + p] *= col[8 * d + 4 * s + 2 * p + 1] * T.exp2(
                    col[8 * d + 4 * s + 2 * p] - row[4 * d + 2 * s]
                )
    store_transposed(keys, w, half, lane)


# ---- blocks into the result's tile


@T.macro
def store_block(w, block, row_block, col_block, lane, dtype, transposed):
    """Rounds a block, or its transpose, to dtype and stores it into the scratch's tile."""
    packed = T.alloc_local((4,), "int32")
    pack(packed, block, dtype, transposed)
    _store_matrices(w, packed, row_block, col_block, lane, transposed)


def pack(packed, block, dtype, transposed):
    """Call expression: packed = block rounded, in stmatrix's order."""
    name = f"flash_qla::pack<{dtype == 'bfloat16':d}, {transposed:d}>"
    return T.call_extern("handle", name, T.address_of(packed[0]), T.address_of(block[0]))


@T.macro
def store_zeros(w, lane, blocks):
    """Zeros in these (row, column) blocks of the tile."""
    zeros = T.alloc_local((4,), "int32")
    for i in T.unroll(4):
        zeros[i] = 0
    for row_block, col_block in blocks:
        _store_matrices(w, zeros, row_block, col_block, lane, False)


def tile_word(w, row, piece, lower):
    """Expression: first word of 16-byte piece `piece` of row `row` of the tile's lower or upper half."""
    if lower:
        return w.base + row * 32 + (piece ^ (row % 8)) * 4
    return w.base + UPPER + row * 16 + (piece ^ (row // 2 % 4)) * 4


@T.macro
def _store_matrices(w, packed, row_block, col_block, lane, transposed):
    """One stmatrix: lane l gives the address of row l % 8 of matrix l // 8."""
    name = "tl::ptx_stmatrix_m8n8_x4_trans" if transposed else "tl::ptx_stmatrix_m8n8_x4"
    word = tile_word(w, row_block % 2 * BLOCK + lane % 16, col_block * 2 + lane // 16, row_block >= 2)
    T.call_extern("handle", name, T.address_of(w.scratch[word]), packed[0], packed[1], packed[2], packed[3])


# ---- the inverse


@T.macro
def substitute(w, lane):
    """Replaces the scratch's eight Nᵀ by the eight Xᵀ (Zᵀ). Lane l: columns 2 (l % 4) and the next of block l // 4."""
    x_even, x_odd, row = _locals(3)
    start = T.alloc_local((2,), "float32")
    for r in T.unroll(2):
        if w.plain:
            start[r] = w.gates[w.first_gate + 2 * lane + r]
        else:
            start[r] = T.if_then_else(w.ready != 0, w.gates[w.first_gate + 4 * lane + 2 * r + 1], 1.0)
    for i in T.unroll(8):
        x_even[i] = T.if_then_else(lane % 4 * 2 == i, start[0], 0.0)
        x_odd[i] = T.if_then_else(lane % 4 * 2 + 1 == i, start[1], 0.0)
    for j in T.unroll(7):
        for q in T.unroll(2):
            if q >= (j + 1) // 4:
                for v in T.vectorized(4):
                    row[4 * q + v] = w.scratch[w.base + lane // 4 * N_BLOCK + j * N_ROW + 4 * q + v]
        for i in T.unroll(8):
            if i > j:
                x_even[i] = x_even[i] + row[i] * x_even[j]
                x_odd[i] = x_odd[i] + row[i] * x_odd[j]
    T.sync_warp()
    for q in T.unroll(2):
        for v in T.vectorized(4):
            w.scratch[w.base + lane // 4 * X_BLOCK + lane % 4 * 2 * X_ROW + 4 * q + v] = x_even[4 * q + v]
        for v in T.vectorized(4):
            w.scratch[w.base + lane // 4 * X_BLOCK + lane % 4 * 2 * X_ROW + X_ROW + 4 * q + v] = x_odd[4 * q + v]
    T.sync_warp()


@T.macro
def load_small(plain, transposed, w, half, lane):
    """plain[2 e:], transposed[2 e:] = the lane's pair of the 8 x 8 inverse 4 half + e and of its transpose."""
    for e in T.unroll(4):
        for p in T.vectorized(2):
            transposed[2 * e + p] = w.scratch[w.base + (4 * half + e) * X_BLOCK + lane // 4 * X_ROW + lane % 4 * 2 + p]
        for p in T.unroll(2):
            plain[2 * e + p] = w.scratch[w.base + (4 * half + e) * X_BLOCK + (lane % 4 * 2 + p) * X_ROW + lane // 4]


@T.macro
def merge_16(blocks, blocks_t, w, plain, transposed, n10):
    """blocks[d], blocks_t[d] = X_dd and its transpose for two neighbouring d, from the lane's pairs of 8 x 8 blocks."""
    first_t, second, x10t, x10 = _locals(4, 4)
    for e in T.unroll(2):
        for p in T.unroll(2):
            first_t[2 * e + p] = transposed[4 * e + p]
            second[2 * e + p] = plain[4 * e + 2 + p]
    T.call_extern(
        "handle", "flash_qla::merge_8", T.address_of(x10t[0]), T.address_of(x10[0]), T.address_of(first_t[0]),
        T.address_of(n10[0]), T.address_of(second[0]), w.minus,
    )  # fmt: skip
    for e in (0, 1):
        for p in T.unroll(2):
            blocks[e][p] = plain[4 * e + p]
            blocks[e][2 + p] = x10[2 * e + p]
            blocks[e][4 + p] = 0.0
            blocks[e][6 + p] = plain[4 * e + 2 + p]
            blocks_t[e][p] = transposed[4 * e + p]
            blocks_t[e][2 + p] = 0.0
            blocks_t[e][4 + p] = x10t[2 * e + p]
            blocks_t[e][6 + p] = transposed[4 * e + 2 + p]


@T.macro
def prepare(w, n10, lane):
    """First half of the inverse. n10: eight registers for `finish`."""
    if not w.plain:
        fill_factors(w, lane)
    gate_diagonal(n10, w, lane)


@T.macro
def finish(w, n10, lane, dtype):
    """The warp's scratch = (I + L)^-1 in dtype, SCRATCH's two parts. Equation: F2.

    Every lane must have arrived here with keys, gates and betas visible; ends without synchronising the warp.
    """
    x00t, x11t, x22t, x22, x33, x11_right = _operands(6)
    packed = _locals(4, 4, "int32")
    halves = [_locals(4) for _ in range(2)]
    substitute(w, lane)
    _merge_diagonal(halves, w, n10, lane)
    _split_diagonal(w, packed, halves, (x00t, x11t, x22t, None), (None, x11_right, x22, x33), dtype, lane)
    T.sync_warp()
    store_zeros(w, lane, LOWER_ZEROS)
    for d in (0, 1, 2, 3):
        _store_matrices(w, packed[d], d, d, lane, False)
    x10t, x32 = _operands(2)
    _merge_32(w, x10t, x32, x00t, x11_right, x22t, x33, lane, dtype)
    _merge_64(w, x00t, x10t, x11t, x22, x32, x33, lane, dtype)


@T.macro
def _merge_diagonal(halves, w, n10, lane):
    """halves[h] = (X_dd, X_ee, X_ddᵀ, X_eeᵀ), d = 2 h, e = d + 1; side by side: two chains of products at a time."""
    plain, transposed = _locals(2), _locals(2)
    n10_half = _locals(2, 4)
    for half in (0, 1):
        load_small(plain[half], transposed[half], w, half, lane)
        for i in T.unroll(4):
            n10_half[half][i] = n10[4 * half + i]
    for half in (0, 1):
        merge_16(halves[half][:2], halves[half][2:], w, plain[half], transposed[half], n10_half[half])


@T.macro
def _split_diagonal(w, packed, halves, transposed_operands, operands, dtype, lane):
    """The diagonal blocks packed for the tile, and split where somebody wants them; transposed ones times c."""
    scaled, factors = _locals(1)[0], _locals(1, 4)[0]
    for d in (0, 1, 2, 3):
        pack(packed[d], halves[d // 2][d % 2], dtype, False)
        if operands[d] is not None:
            split(w, operands[d], halves[d // 2][d % 2], right=d < 2)
        if transposed_operands[d] is not None:
            load_factors(factors, w, COLUMN_FACTOR, d, lane)
            scale_columns(w, scaled, halves[d // 2][2 + d % 2], factors)
            split(w, transposed_operands[d], scaled, right=False)


@T.macro
def _merge_32(w, x10t, x32, x00t, x11_right, x22t, x33, lane, dtype):
    """X10 and X32; x10t = X10ᵀ c1."""
    g10, g32, y10t, y32t = _operands(4)
    upper, lower = _locals(2)
    row_1, row_3, column_1 = _locals(3, 4)
    load_keys(g10, w, 1, 0, lane)
    load_keys(g32, w, 3, 2, lane)
    load_factors(row_1, w, ROW_FACTOR, 1, lane)
    load_factors(row_3, w, ROW_FACTOR, 3, lane)
    set_product(upper, x00t, g10)
    set_product(lower, x22t, g32)
    scale_columns(w, upper, upper, row_1)
    split(w, y10t, upper, right=False)
    scale_columns(w, lower, lower, row_3)
    split(w, y32t, lower, right=True)
    set_product(upper, y10t, x11_right)
    set_product(lower, x33, y32t)
    store_block(w, upper, 1, 0, lane, dtype, transposed=True)
    store_block(w, lower, 3, 2, lane, dtype, transposed=False)
    load_factors(column_1, w, COLUMN_FACTOR, 1, lane)
    scale_columns(w, upper, upper, column_1)
    split(w, x10t, upper, right=False)
    split(w, x32, lower, right=False)


@T.macro
def _merge_64(w, x00t, x10t, x11t, x22, x32, x33, lane, dtype):
    """Blocks of the lower left quarter."""
    y20, y21, y30, y31 = _operands(4)
    x20, x21, x30, x31 = _locals(4)
    _middle(w, y20, y21, x00t, x10t, x11t, 2, lane)
    _middle(w, y30, y31, x00t, x10t, x11t, 3, lane)
    set_product(x20, x22, y20)
    set_product(x21, x22, y21)
    set_product(x30, x32, y20)
    set_product(x31, x32, y21)
    store_block(w, x20, 2, 0, lane, dtype, transposed=False)
    store_block(w, x21, 2, 1, lane, dtype, transposed=False)
    add_product(x30, x33, y30)
    add_product(x31, x33, y31)
    store_block(w, x30, 3, 0, lane, dtype, transposed=False)
    store_block(w, x31, 3, 1, lane, dtype, transposed=False)


@T.macro
def _middle(w, ya0, ya1, x00t, x10t, x11t, a, lane):
    """Ya0, Ya1 as right operands."""
    ga0, ga1 = _operands(2)
    ya0t, ya1t = _locals(2)
    row = T.alloc_local((4,), "float32")
    load_keys(ga0, w, a, 0, lane)
    load_keys(ga1, w, a, 1, lane)
    load_factors(row, w, ROW_FACTOR, a, lane)
    if not w.plain and a == 3:
        _step_rows(row, w)
    set_product(ya0t, x00t, ga0)
    set_product(ya1t, x11t, ga1)
    if not w.plain:
        _step_columns(ya0t, w)
    add_product(ya0t, x10t, ga1)
    scale_columns(w, ya1t, ya1t, row)
    split(w, ya1, ya1t, right=True)
    scale_columns(w, ya0t, ya0t, row)
    split(w, ya0, ya0t, right=True)


@T.macro
def _step_rows(row, w):
    for i in T.unroll(4):
        row[i] *= step_factor(w, 2)


@T.macro
def _step_columns(block, w):
    first_step = T.alloc_var("float32")
    first_step = step_factor(w, 1)
    for i in T.unroll(PER_LANE):
        block[i] *= first_step
