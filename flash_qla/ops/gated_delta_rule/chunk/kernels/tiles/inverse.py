"""Inverse of a 64 x 64 unit lower triangular matrix inside one warp, to 2^-17.

The matrix is a 4 x 4 grid of 16 x 16 blocks. A block lives in registers in the *accumulator layout* of `mma.m16n8k16`:
lane = 4 u + w holds

    block[4 s + 2 r + p] = element (u + 8 r, 2 w + p + 8 s)          r, s, p in {0, 1}

Packed in pairs, an accumulator is a left operand (pairs in the order 2 s + r) and, transposed, a right operand
(2 r + s) as it stands. So `add_product` computes D += A Bᵀ from accumulators, without a shuffle or a trip through
shared memory, and the inverse is written with that product alone, mixing blocks and transposed blocks.

With N = -L (no sign is left anywhere), X = (I - N)^-1 and Y_ab = sum_c N_ac X_cb:

    8 x 8 diagonal blocks   by substitution in fp32, two columns a lane, from Nᵀ in shared memory
    8 -> 16                 Yᵀ = X0ᵀ N10ᵀ, X10 = X1 Y, X10ᵀ = Yᵀ X1ᵀ for two diagonal blocks in one product
    16 -> 32                Y10ᵀ = X00ᵀ N10ᵀ, X10ᵀ = Y10ᵀ X11ᵀ           Y32ᵀ = X22ᵀ N32ᵀ, X32 = X33 Y32
    32 -> 64                Y2bᵀ, Y3bᵀ from X00ᵀ, X11ᵀ, X10ᵀ;  [X2b; X3b] = [X22 0; X32 X33] [Y2b; Y3b], b = 0, 1

Tensor cores multiply operands split into two bf16 terms (high x high + high x low + low x high, fp32 accumulation):
the error is 2^-17 with fp32's range, so that also inverses whose entries cancel or grow (keys that are not normalised)
end at the rounding of the result. One tf32 term leaves 2^-11, which then shows; three are as good as fp32 and need
twice the tensor core time.
"""

from dataclasses import dataclass

import tilelang.language as T

BLOCK = 16
PER_LANE = 8
SCRATCH = 2048  # fp32 words of shared memory a warp needs: the result's 64 x 64 half-precision tile
KEYS_WORDS = 10 * BLOCK * BLOCK
# Row and block strides (words) of the scratch's two earlier contents, 8 x 8 blocks; free of bank conflicts.
N_ROW, N_BLOCK = 8, 68
X_ROW, X_BLOCK = 12, 100
# Vectors of 64 rows in WarpSolve.rows: log2 cumulative gate g; -beta; decay exp2(g_r - g_j) from row j to the first row
# r of the next block; and for b = 0, 1, 2, -beta_i exp2(g_i - g_r), r = 16 b + 16 <= i. Exponents are at most 0 where
# the gate falls.
GATE, BETA, COLUMN_FACTOR, ROW_FACTOR = 0, 64, 128, 192
ROWS_WORDS = 392  # 8 more than needed: warps' vectors start in different banks
HIGH_HALF = -65536  # 0xffff0000


@dataclass(frozen=True)
class WarpSolve:
    """What one warp inverts from and in. All in shared memory, fp32, one-dimensional; offsets in words.

    Attributes:
        scratch, base: SCRATCH words, the warp's own, at scratch[base]; afterwards they hold the result's tile.
        keys: K Kᵀ, KEYS_WORDS lower blocks as `keys_offset` orders them; may be shared by several warps.
        rows, first: ROWS_WORDS words, the warp's own, at rows[first]; the caller sets GATE and BETA.
    """

    scratch: object
    base: object
    keys: object
    rows: object
    first: object


def keys_offset(i, j):
    """Word of element (i, j), j // 16 <= i // 16, of K Kᵀ: blocks row by row, each as two 16-byte pieces a lane."""
    block = i // BLOCK * (i // BLOCK + 1) // 2 + j // BLOCK
    return block * 256 + j % 16 // 8 * 128 + (i % 8 * 4 + j % 8 // 2) * 4 + i % 16 // 8 * 2 + j % 2


def _locals(count, size=PER_LANE, dtype="float32"):
    return [T.alloc_local((size,), dtype) for _ in range(count)]


def _word(packed, i):
    """Expression: the 32-bit register that holds pair i of a packed half-precision array."""
    return T.call_extern("int32", "*(const int*)", T.address_of(packed[2 * i]))


# ---- products of blocks


@dataclass(frozen=True)
class Operand:
    """A block as two bf16 terms, packed in pairs. One quad of registers each: build it once, use it often."""

    high: object
    low: object


def _operands(count):
    return [Operand(*_locals(2, dtype="bfloat16")) for _ in range(count)]


@T.macro
def split(operand, block, right):
    """operand = block (accumulator layout) as a left operand, or its transpose as a right one."""
    rest = T.alloc_local((2,), "float32")
    for i in T.unroll(4):
        place = (i % 2 * 2 + i // 2) if right else i
        for p in T.vectorized(2):
            operand.high[2 * place + p] = T.cast(block[2 * i + p], "bfloat16")
        bits = _word(operand.high, place)
        rest[0] = block[2 * i] - T.reinterpret(bits << 16, "float32")
        rest[1] = block[2 * i + 1] - T.reinterpret(bits & HIGH_HALF, "float32")
        for p in T.vectorized(2):
            operand.low[2 * place + p] = T.cast(rest[p], "bfloat16")


@T.macro
def _mma(acc, left, right, n):
    T.ptx_mma(
        "float32", "m16n8k16", "row", "col", "bf16", "bf16", "fp32",
        left.data, 0, right.data, 4 * n, acc.data, 4 * n, T.bool(False),
    )  # fmt: skip


@T.macro
def add_product(acc, left, right):
    """acc += left rightᵀ in accumulator layout."""
    for n in T.unroll(2):
        _mma(acc, left.low, right.high, n)
    for n in T.unroll(2):
        _mma(acc, left.high, right.low, n)
    for n in T.unroll(2):
        _mma(acc, left.high, right.high, n)


@T.macro
def set_product(acc, left, right):
    for i in T.unroll(PER_LANE):
        acc[i] = 0.0
    add_product(acc, left, right)


@T.macro
def _split_pairs(high, low, values, stride):
    """As `split` for two pairs, the second stride places on. High terms are cut, not rounded, so that the compiler
    finds nothing in common with `split` of the same values and does not gather its operands from here, move by move."""
    cut, rest = _locals(2, 2)
    for e in T.unroll(2):
        for p in T.unroll(2):
            cut[p] = T.reinterpret(T.reinterpret(values[2 * e + p], "int32") & HIGH_HALF, "float32")
            rest[p] = values[2 * e + p] - cut[p]
        for p in T.vectorized(2):
            high[2 * stride * e + p] = T.cast(cut[p], "bfloat16")
        for p in T.vectorized(2):
            low[2 * stride * e + p] = T.cast(rest[p], "bfloat16")


@T.macro
def set_twin_product(acc, left, right):
    """Two 8 x 8 products at once, acc_e = left_e right_eᵀ, e = 0, 1, where x_e = (x[2 e], x[2 e + 1]): left becomes
    block diagonal, right is stacked along k."""
    left_high, left_low, right_high, right_low = _locals(4, dtype="bfloat16")
    for i in T.vectorized(8):
        left_high[i] = T.cast(0.0, "bfloat16")
    for i in T.vectorized(8):
        left_low[i] = T.cast(0.0, "bfloat16")
    _split_pairs(left_high, left_low, left, 3)
    _split_pairs(right_high, right_low, right, 1)
    for i in T.unroll(4):
        acc[i] = 0.0
    _mma(acc, left_low, right_high, 0)
    _mma(acc, left_high, right_low, 0)
    _mma(acc, left_high, right_high, 0)


# ---- rows and gated blocks


@T.macro
def fill_factors(w, lane):
    """Fills the factors of w.rows from its GATE and BETA."""
    gate, beta = _locals(2, 2)
    anchor = T.alloc_var("float32")
    for r in T.vectorized(2):
        gate[r] = w.rows[w.first + GATE + 2 * lane + r]
    for r in T.vectorized(2):
        beta[r] = w.rows[w.first + BETA + 2 * lane + r]
    anchor = T.shfl_sync(gate[0], (lane // 8 * 8 + 8) % 32)
    for r in T.vectorized(2):
        w.rows[w.first + COLUMN_FACTOR + 2 * lane + r] = T.exp2(anchor - gate[r])
    for b in T.unroll(3):
        anchor = T.shfl_sync(gate[0], 8 * b + 8)
        for r in T.vectorized(2):
            w.rows[w.first + ROW_FACTOR + 64 * b + 2 * lane + r] = beta[r] * T.exp2(gate[r] - anchor)


@T.macro
def load_keys(block, keys, number, lane):
    for s in T.unroll(2):
        for v in T.vectorized(4):
            block[4 * s + v] = keys[number * 256 + s * 128 + lane * 4 + v]


@T.macro
def load_gated(operand, w, a, b, lane):
    """operand = N_abᵀ as a right operand, a > b, N_ij = -beta_i exp2(g_i - g_j) (k_i . k_j)."""
    block = T.alloc_local((PER_LANE,), "float32")
    column = T.alloc_local((4,), "float32")
    row = T.alloc_local((2,), "float32")
    load_keys(block, w.keys, a * (a + 1) // 2 + b, lane)
    for s in T.unroll(2):
        for p in T.vectorized(2):
            column[2 * s + p] = w.rows[w.first + COLUMN_FACTOR + BLOCK * b + 8 * s + lane % 4 * 2 + p]
        row[s] = w.rows[w.first + ROW_FACTOR + 64 * b + BLOCK * a + 8 * s + lane // 4]
    for s in T.unroll(2):
        for r in T.unroll(2):
            for p in T.unroll(2):
                block[4 * s + 2 * r + p] *= row[r] * column[2 * s + p]
    split(operand, block, right=True)


@T.macro
def gate_diagonal(n10, w, lane):
    """Of each diagonal block: n10[2 d:] = its lower left 8 x 8 block; Nᵀ of its two diagonal ones to the scratch.

    What lies on and below the diagonal of an Nᵀ (i <= j, exponents above 0) is never read. All loads come first: the
    compiler cannot move them over the stores.
    """
    keys = T.alloc_local((4 * PER_LANE,), "float32")
    gate, beta = _locals(2, 16)
    row_gate = T.alloc_local((8,), "float32")
    row_beta = T.alloc_local((4,), "float32")
    for d in T.unroll(4):
        for s in T.unroll(2):
            for v in T.vectorized(4):
                keys[8 * d + 4 * s + v] = w.keys[d * (d + 3) // 2 * 256 + s * 128 + lane * 4 + v]
            for p in T.vectorized(2):
                gate[4 * d + 2 * s + p] = w.rows[w.first + GATE + BLOCK * d + 8 * s + lane % 4 * 2 + p]
            for p in T.vectorized(2):
                beta[4 * d + 2 * s + p] = w.rows[w.first + BETA + BLOCK * d + 8 * s + lane % 4 * 2 + p]
            row_gate[2 * d + s] = w.rows[w.first + GATE + BLOCK * d + 8 * s + lane // 4]
        row_beta[d] = w.rows[w.first + BETA + BLOCK * d + 8 + lane // 4]
    for d in T.unroll(4):
        for p in T.unroll(2):
            n10[2 * d + p] = keys[8 * d + 2 + p] * row_beta[d] * T.exp2(row_gate[2 * d + 1] - gate[4 * d + p])
        for s in T.unroll(2):
            for p in T.unroll(2):
                keys[8 * d + 6 * s + p] *= beta[4 * d + 2 * s + p] * T.exp2(
                    gate[4 * d + 2 * s + p] - row_gate[2 * d + s]
                )
    for d in T.unroll(4):
        for s in T.unroll(2):
            for p in T.vectorized(2):
                w.scratch[w.base + (2 * d + s) * N_BLOCK + lane // 4 * N_ROW + lane % 4 * 2 + p] = keys[
                    8 * d + 6 * s + p
                ]


# ---- blocks into the result's tile


@T.macro
def pack(packed, block, transposed):
    """packed = block rounded, in stmatrix's order."""
    for i in T.unroll(4):
        for p in T.vectorized(2):
            packed[2 * ((i % 2 * 2 + i // 2) if transposed else i) + p] = T.cast(block[2 * i + p], packed.dtype)


@T.macro
def store_block(w, block, row_block, col_block, lane, dtype, transposed):
    """Rounds a block, or its transpose, to dtype and stores it into the scratch's tile.

    The tile has 64 rows of 128 bytes whose 16-byte pieces are exchanged by the 128-byte swizzle.
    """
    packed = T.alloc_local((PER_LANE,), dtype)
    pack(packed, block, transposed)
    _store_matrices(w, packed, row_block, col_block, lane, transposed)


@T.macro
def store_zeros(w, dtype, lane):
    """Zeros in the tile's blocks above the diagonal."""
    zeros = T.alloc_local((PER_LANE,), dtype)
    for i in T.vectorized(PER_LANE):
        zeros[i] = T.cast(0.0, dtype)
    for row_block in T.unroll(3):
        for col_block in T.unroll(4):
            if col_block > row_block:
                _store_matrices(w, zeros, row_block, col_block, lane, False)


@T.macro
def _store_matrices(w, packed, row_block, col_block, lane, transposed):
    """One stmatrix: lane l gives the address of row l % 8 of matrix l // 8."""
    name = "tl::ptx_stmatrix_m8n8_x4_trans" if transposed else "tl::ptx_stmatrix_m8n8_x4"
    row = row_block * BLOCK + lane % 16
    piece = (col_block * 2 + lane // 16) ^ (lane % 8)
    registers = [_word(packed, i) for i in (0, 1, 2, 3)]
    T.call_extern("handle", name, T.address_of(w.scratch[w.base + row * 32 + piece * 4]), *registers)


# ---- the inverse


@T.macro
def substitute(w, lane):
    """Replaces the scratch's eight Nᵀ by the eight Xᵀ. Lane l: columns 2 (l % 4) and 2 (l % 4) + 1 of block l // 4."""
    x_even, x_odd, row = _locals(3)
    for i in T.unroll(8):
        x_even[i] = T.if_then_else(lane % 4 * 2 == i, 1.0, 0.0)
        x_odd[i] = T.if_then_else(lane % 4 * 2 + 1 == i, 1.0, 0.0)
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
def merge_16(blocks, blocks_t, plain, transposed, n10):
    """blocks[d], blocks_t[d] = X_dd and its transpose for two neighbouring d, from the lane's pairs of 8 x 8 blocks."""
    first_t, second, yt, x10t, x10 = _locals(5, 4)
    for e in T.unroll(2):
        for p in T.unroll(2):
            first_t[2 * e + p] = transposed[4 * e + p]
            second[2 * e + p] = plain[4 * e + 2 + p]
    set_twin_product(yt, first_t, n10)
    set_twin_product(x10t, yt, second)
    set_twin_product(x10, second, yt)
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
def invert(w, lane, dtype):
    """The warp's scratch = (I + L)^-1 in dtype, 64 rows of 128 bytes under the 128-byte swizzle. Equation: F2.

    Every lane must have arrived here with keys, GATE and BETA visible; ends without synchronising the warp.
    """
    x00t, x11t, x22t, x22, x33, x11_right = _operands(6)
    n10 = T.alloc_local((8,), "float32")
    packed = _locals(4, dtype=dtype)
    fill_factors(w, lane)
    gate_diagonal(n10, w, lane)
    T.sync_warp()
    substitute(w, lane)
    _finish_diagonal(w, packed, (x00t, x11t), (None, x11_right), n10, 0, lane)
    _finish_diagonal(w, packed, (x22t, None), (x22, x33), n10, 1, lane)
    T.sync_warp()
    store_zeros(w, dtype, lane)
    for d in (0, 1, 2, 3):
        _store_matrices(w, packed[d], d, d, lane, False)
    x10t, x32 = _operands(2)
    _merge_32(w, x10t, x32, x00t, x11_right, x22t, x33, lane, dtype)
    _merge_64(w, x00t, x10t, x11t, x22, x32, x33, lane, dtype)


@T.macro
def _finish_diagonal(w, packed, transposed_operands, operands, n10, half, lane):
    """The diagonal blocks 2 half, 2 half + 1: merged, packed for the tile, split where somebody wants them."""
    blocks, blocks_t = _locals(2), _locals(2)
    plain, transposed = _locals(2)
    n10_half = T.alloc_local((4,), "float32")
    load_small(plain, transposed, w, half, lane)
    for i in T.unroll(4):
        n10_half[i] = n10[4 * half + i]
    merge_16(blocks, blocks_t, plain, transposed, n10_half)
    for e in (0, 1):
        pack(packed[2 * half + e], blocks[e], False)
        if transposed_operands[e] is not None:
            split(transposed_operands[e], blocks_t[e], right=False)
        if operands[e] is not None:
            split(operands[e], blocks[e], right=half == 0)


@T.macro
def _merge_32(w, x10t, x32, x00t, x11_right, x22t, x33, lane, dtype):
    """X10ᵀ = (X00ᵀ N10ᵀ) X11ᵀ and X32 = X33 (X22ᵀ N32ᵀ)ᵀ."""
    n10, n32, y10t, y32t = _operands(4)
    upper, lower = _locals(2)
    load_gated(n10, w, 1, 0, lane)
    load_gated(n32, w, 3, 2, lane)
    set_product(upper, x00t, n10)
    set_product(lower, x22t, n32)
    split(y10t, upper, right=False)
    split(y32t, lower, right=True)
    set_product(upper, y10t, x11_right)
    set_product(lower, x33, y32t)
    split(x10t, upper, right=False)
    split(x32, lower, right=False)
    store_block(w, upper, 1, 0, lane, dtype, transposed=True)
    store_block(w, lower, 3, 2, lane, dtype, transposed=False)


@T.macro
def _merge_64(w, x00t, x10t, x11t, x22, x32, x33, lane, dtype):
    """[X2b; X3b] = [X22 0; X32 X33] [Y2b; Y3b], b = 0, 1, with Yᵀ = [X00ᵀ X10ᵀ; 0 X11ᵀ] [N20ᵀ N30ᵀ; N21ᵀ N31ᵀ]."""
    n20, n30, n21, n31 = _operands(4)
    y2t, y3t = _locals(2)
    load_gated(n21, w, 2, 1, lane)
    load_gated(n31, w, 3, 1, lane)
    set_product(y2t, x11t, n21)
    set_product(y3t, x11t, n31)
    _merge_column(w, y2t, y3t, x22, x32, x33, 1, lane, dtype)
    load_gated(n20, w, 2, 0, lane)
    load_gated(n30, w, 3, 0, lane)
    set_product(y2t, x10t, n21)
    set_product(y3t, x10t, n31)
    add_product(y2t, x00t, n20)
    add_product(y3t, x00t, n30)
    _merge_column(w, y2t, y3t, x22, x32, x33, 0, lane, dtype)


@T.macro
def _merge_column(w, y2t, y3t, x22, x32, x33, b, lane, dtype):
    y2, y3 = _operands(2)
    x2, x3 = _locals(2)
    split(y2, y2t, right=True)
    split(y3, y3t, right=True)
    set_product(x2, x22, y2)
    set_product(x3, x33, y3)
    add_product(x3, x32, y2)
    store_block(w, x2, 2, b, lane, dtype, transposed=False)
    store_block(w, x3, 3, b, lane, dtype, transposed=False)
