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
KEYS_WORDS = 10 * BLOCK * BLOCK
SCRATCH = 2048  # fp32 words of shared memory a warp needs: the result's 64 x 64 half-precision tile
# Row and block strides (words) of the scratch's two earlier contents, 8 x 8 blocks; free of bank conflicts.
N_ROW, N_BLOCK = 8, 68
X_ROW, X_BLOCK = 12, 100
# WarpSolve.gates: pairs (g, -beta) of the 64 rows, g the log2 cumulative gate. WarpSolve.factors: the decay
# exp2(g_r - g_j) from row j to the first row r of the next block; and for b = 0, 1, 2, -beta_i exp2(g_i - g_r),
# r = 16 b + 16 <= i. Exponents are at most 0 where the gate falls.
GATES_WORDS = 136  # 8 more than needed: heads' vectors start in different banks
COLUMN_FACTOR, ROW_FACTOR, FACTORS_WORDS = 0, 64, 160
ROW_FACTOR_SHIFT = (-16, 16, 32)  # row i of b lies at ROW_FACTOR + i + shift: 48, 32 and 16 rows
UPPER_ZEROS, LOWER_ZEROS = ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3)), ((2, 3),)  # blocks above the diagonal
HIGH_HALF = -65536  # 0xffff0000


@dataclass(frozen=True)
class WarpSolve:
    """What one warp inverts from and in. All in shared memory, fp32, one-dimensional; offsets in words.

    Attributes:
        scratch, base: SCRATCH words, the warp's own, at scratch[base]; afterwards they hold the result's tile. The
            blocks UPPER_ZEROS of the tile are never written: the caller zeroes them once (`store_zeros`).
        keys, first_key: K Kᵀ, KEYS_WORDS lower blocks as `keys_offset` orders them; several warps may share them.
        gates, first_gate: GATES_WORDS words, set by the caller.
        factors, first_factor: FACTORS_WORDS words, the warp's own.
    """

    scratch: object
    base: object
    keys: object
    first_key: object
    gates: object
    first_gate: object
    factors: object
    first_factor: object


def keys_offset(i, j):
    """Word of element (i, j), j // 16 <= i // 16, of K Kᵀ: blocks row by row, each as two 16-byte pieces a lane."""
    block = i // BLOCK * (i // BLOCK + 1) // 2 + j // BLOCK
    return block * 256 + j % 16 // 8 * 128 + (i % 8 * 4 + j % 8 // 2) * 4 + i % 16 // 8 * 2 + j % 2


def small(w):
    """Expression: where the 8 x 8 blocks lie, in the tile's lower half: zeros above its diagonal outlive them."""
    return w.base + 1024


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
    """Fills w.factors from w.gates."""
    pairs, out = _locals(1, 4)[0], _locals(1, 2)[0]
    anchor = T.alloc_var("float32")
    for v in T.vectorized(4):
        pairs[v] = w.gates[w.first_gate + 4 * lane + v]
    anchor = w.gates[w.first_gate + 2 * BLOCK * ((lane // 8 + 1) % 4)]
    for r in T.unroll(2):
        out[r] = T.exp2(anchor - pairs[2 * r])
    for r in T.vectorized(2):
        w.factors[w.first_factor + COLUMN_FACTOR + 2 * lane + r] = out[r]
    for b in (0, 1, 2):
        anchor = w.gates[w.first_gate + 2 * BLOCK * (b + 1)]
        for r in T.unroll(2):
            out[r] = pairs[2 * r + 1] * T.exp2(pairs[2 * r] - anchor)
        if lane >= 8 * b + 8:
            for r in T.vectorized(2):
                w.factors[w.first_factor + ROW_FACTOR + ROW_FACTOR_SHIFT[b] + 2 * lane + r] = out[r]


@T.macro
def load_keys(block, w, number, lane):
    for s in T.unroll(2):
        for v in T.vectorized(4):
            block[4 * s + v] = w.keys[w.first_key + number * 256 + s * 128 + lane * 4 + v]


@T.macro
def load_gated(operand, w, a, b, lane):
    """operand = N_abᵀ as a right operand, a > b, N_ij = -beta_i exp2(g_i - g_j) (k_i . k_j)."""
    block = T.alloc_local((PER_LANE,), "float32")
    column = T.alloc_local((4,), "float32")
    row = T.alloc_local((2,), "float32")
    load_keys(block, w, a * (a + 1) // 2 + b, lane)
    for s in T.unroll(2):
        for p in T.vectorized(2):
            column[2 * s + p] = w.factors[w.first_factor + COLUMN_FACTOR + BLOCK * b + 8 * s + lane % 4 * 2 + p]
        row[s] = w.factors[w.first_factor + ROW_FACTOR + ROW_FACTOR_SHIFT[b] + BLOCK * a + 8 * s + lane // 4]
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
    for half in (0, 1):
        _gate_two(n10, w, half, lane)
        T.sync_warp()  # registers: keeps the second half's loads behind it


@T.macro
def _gate_two(n10, w, half, lane):
    """Diagonal blocks 2 half and 2 half + 1 of `gate_diagonal`."""
    keys = T.alloc_local((2 * PER_LANE,), "float32")
    col = T.alloc_local((16,), "float32")
    row = T.alloc_local((8,), "float32")
    for d in (0, 1):
        block = 2 * half + d
        for s in T.unroll(2):
            for v in T.vectorized(4):
                keys[8 * d + 4 * s + v] = w.keys[w.first_key + block * (block + 3) // 2 * 256 + s * 128 + lane * 4 + v]
            for v in T.vectorized(4):
                col[8 * d + 4 * s + v] = w.gates[w.first_gate + 2 * BLOCK * block + 16 * s + lane % 4 * 4 + v]
            for v in T.vectorized(2):
                row[4 * d + 2 * s + v] = w.gates[w.first_gate + 2 * BLOCK * block + 16 * s + lane // 4 * 2 + v]
    for d in T.unroll(2):
        for p in T.unroll(2):
            n10[4 * half + 2 * d + p] = (
                keys[8 * d + 2 + p] * row[4 * d + 3] * T.exp2(row[4 * d + 2] - col[8 * d + 2 * p])
            )
        for s in T.unroll(2):
            for p in T.unroll(2):
                keys[8 * d + 6 * s + p] *= col[8 * d + 4 * s + 2 * p + 1] * T.exp2(
                    col[8 * d + 4 * s + 2 * p] - row[4 * d + 2 * s]
                )
    for d in T.unroll(2):
        for s in T.unroll(2):
            for p in T.vectorized(2):
                w.scratch[small(w) + (4 * half + 2 * d + s) * N_BLOCK + lane // 4 * N_ROW + lane % 4 * 2 + p] = keys[
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
def store_zeros(w, dtype, lane, blocks):
    """Zeros in these (row, column) blocks of the tile."""
    zeros = T.alloc_local((PER_LANE,), dtype)
    for i in T.vectorized(PER_LANE):
        zeros[i] = T.cast(0.0, dtype)
    for row_block, col_block in blocks:
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
                    row[4 * q + v] = w.scratch[small(w) + lane // 4 * N_BLOCK + j * N_ROW + 4 * q + v]
        for i in T.unroll(8):
            if i > j:
                x_even[i] = x_even[i] + row[i] * x_even[j]
                x_odd[i] = x_odd[i] + row[i] * x_odd[j]
    T.sync_warp()
    for q in T.unroll(2):
        for v in T.vectorized(4):
            w.scratch[small(w) + lane // 4 * X_BLOCK + lane % 4 * 2 * X_ROW + 4 * q + v] = x_even[4 * q + v]
        for v in T.vectorized(4):
            w.scratch[small(w) + lane // 4 * X_BLOCK + lane % 4 * 2 * X_ROW + X_ROW + 4 * q + v] = x_odd[4 * q + v]
    T.sync_warp()


@T.macro
def load_small(plain, transposed, w, half, lane):
    """plain[2 e:], transposed[2 e:] = the lane's pair of the 8 x 8 inverse 4 half + e and of its transpose."""
    for e in T.unroll(4):
        for p in T.vectorized(2):
            transposed[2 * e + p] = w.scratch[
                small(w) + (4 * half + e) * X_BLOCK + lane // 4 * X_ROW + lane % 4 * 2 + p
            ]
        for p in T.unroll(2):
            plain[2 * e + p] = w.scratch[small(w) + (4 * half + e) * X_BLOCK + (lane % 4 * 2 + p) * X_ROW + lane // 4]


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
def prepare(w, n10, lane):
    """First half of the inverse: all that needs w.gates. n10: eight registers for `finish`."""
    fill_factors(w, lane)
    gate_diagonal(n10, w, lane)


@T.macro
def finish(w, n10, lane, dtype):
    """The warp's scratch = (I + L)^-1 in dtype, 64 rows of 128 bytes under the 128-byte swizzle. Equation: F2.

    Every lane must have arrived here with keys, GATE and BETA visible; ends without synchronising the warp.
    """
    x00t, x11t, x22t, x22, x33, x11_right = _operands(6)
    packed = _locals(4, dtype=dtype)
    substitute(w, lane)
    _finish_diagonal(w, packed, (x00t, x11t), (None, x11_right), n10, 0, lane)
    _finish_diagonal(w, packed, (x22t, None), (x22, x33), n10, 1, lane)
    T.sync_warp()
    store_zeros(w, dtype, lane, LOWER_ZEROS)
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
    """[X2b; X3b] = [X22 0; X32 X33] [Y2b; Y3b], b = 0, 1, with Yᵀ = [X00ᵀ X10ᵀ; 0 X11ᵀ] [N20ᵀ N30ᵀ; N21ᵀ N31ᵀ].

    Row by row: fewer operands live at a time than column by column.
    """
    y20, y21, y30, y31 = _operands(4)
    x20, x21, x30, x31 = _locals(4)
    _middle(w, y20, y21, x00t, x10t, x11t, 2, lane)
    set_product(x20, x22, y20)
    set_product(x21, x22, y21)
    store_block(w, x20, 2, 0, lane, dtype, transposed=False)
    store_block(w, x21, 2, 1, lane, dtype, transposed=False)
    set_product(x30, x32, y20)
    set_product(x31, x32, y21)
    _middle(w, y30, y31, x00t, x10t, x11t, 3, lane)
    add_product(x30, x33, y30)
    add_product(x31, x33, y31)
    store_block(w, x30, 3, 0, lane, dtype, transposed=False)
    store_block(w, x31, 3, 1, lane, dtype, transposed=False)


@T.macro
def _middle(w, ya0, ya1, x00t, x10t, x11t, a, lane):
    """Ya0, Ya1 as right operands."""
    na0, na1 = _operands(2)
    ya0t, ya1t = _locals(2)
    load_gated(na1, w, a, 1, lane)
    load_gated(na0, w, a, 0, lane)
    set_product(ya0t, x10t, na1)
    add_product(ya0t, x00t, na0)
    set_product(ya1t, x11t, na1)
    split(ya0, ya0t, right=True)
    split(ya1, ya1t, right=True)
