"""ldmatrix/stmatrix between a 64-column tile of a shared-memory ring and a fragment, the stage a run-time value.

`T.copy` uses them only for whole 2-D buffers; from a ring it falls back to scalar accesses with an address register
each. Here one address per thread serves a tile: the 128-byte swizzle XORs the column, so the others are constants away.
The fragment is a 64 x 64 16-bit accumulator or A operand of one warpgroup (their register orders agree).
"""

import tilelang.language as T

# The moves of a thread's four pairs of 8-column groups.
_LOAD = r"""#pragma unroll
  for (int c = 0; c < 4; ++c)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[4 * c]), "=r"(r[4 * c + 1]), "=r"(r[4 * c + 2]), "=r"(r[4 * c + 3])
                 : "r"(address ^ (c << 5)) : "memory");"""
_STORE = r"""#pragma unroll
  for (int c = 0; c < 4; ++c)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 :: "r"(address ^ (c << 5)), "r"(r[4 * c]), "r"(r[4 * c + 1]), "r"(r[4 * c + 2]), "r"(r[4 * c + 3])
                 : "memory");"""


def _lean_function(of: str, signature: str, registers: str, moves: str) -> str:
    """CUDA of a function that moves a tile: 64 rows of `tile`, 16 registers r of a fragment."""
    return f"""
namespace flash_qla {{
// {of} without an address that lives through the role's loop (needs LEAN_SOURCE).
__device__ __forceinline__ void {signature} {{
  {registers}
  unsigned thread = thread_index(), row = ((thread >> 5) & 3) * 16 + (thread & 15);
  unsigned address = (unsigned)__cvta_generic_to_shared(tile) + row * 128 + ((((thread >> 4) & 1) ^ (row & 7)) << 4);
{moves}
}}
}}  // namespace flash_qla
"""


# Nobody calls these any more: they stay while ends.py's text, and with it its cache key, holds them.
SOURCE = (
    r"""
namespace flash_qla {
// This thread's ldmatrix/stmatrix row in a 64 x 64 tile with the 128-byte swizzle, first pair of 8-column groups.
__device__ __forceinline__ unsigned tile_row(void const* tile) {
  unsigned lane = threadIdx.x & 31, row = ((threadIdx.x >> 5) & 3) * 16 + (lane & 15);
  return (unsigned)__cvta_generic_to_shared(tile) + row * 128 + (((lane >> 4) ^ (row & 7)) << 4);
}
__device__ __forceinline__ void load_tile(void* fragment, void const* tile) {
  unsigned* r = (unsigned*)fragment;
  unsigned address = tile_row(tile);
"""
    + _LOAD
    + r"""
}
// The transpose: thread rows are the tile's columns.
__device__ __forceinline__ void load_tile_transposed(void* fragment, void const* tile) {
  unsigned* r = (unsigned*)fragment;
  unsigned lane = threadIdx.x & 31, row = (lane >> 4) * 8 + (lane & 7);
  unsigned group = ((threadIdx.x >> 5) & 3) * 2 + ((lane >> 3) & 1);
  unsigned address = (unsigned)__cvta_generic_to_shared(tile) + row * 128 + ((group ^ (row & 7)) << 4);
#pragma unroll
  for (int c = 0; c < 4; ++c)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[4 * c]), "=r"(r[4 * c + 1]), "=r"(r[4 * c + 2]), "=r"(r[4 * c + 3])
                 : "r"(address + c * 2048) : "memory");
}
__device__ __forceinline__ void store_tile(void* tile, void const* fragment) {
  unsigned const* r = (unsigned const*)fragment;
  unsigned address = tile_row(tile);
"""
    + _STORE
    + r"""
}
__device__ __forceinline__ void store_part(void* tile, void const* fragment, int part) {
  store_tile(tile, (unsigned const*)fragment + 16 * part);
}
}  // namespace flash_qla
"""
)


# The thread index is read where it is used, so that no address lives in a register through a role's whole loop.
LEAN_SOURCE = r"""
namespace flash_qla {
__device__ __forceinline__ unsigned thread_index() {
  unsigned thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}
// fragment = transpose of the tile: a fragment's rows are the tile's columns.
__device__ __forceinline__ void load_transposed(void* fragment, void const* tile) {
  unsigned* r = (unsigned*)fragment;
  unsigned thread = thread_index(), row = ((thread >> 1) & 8) + (thread & 7);
  unsigned group = ((thread >> 5) & 3) * 2 + ((thread >> 3) & 1);
  unsigned address = (unsigned)__cvta_generic_to_shared(tile) + row * 128 + ((group ^ (row & 7)) << 4);
#pragma unroll
  for (int c = 0; c < 4; ++c)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[4 * c]), "=r"(r[4 * c + 1]), "=r"(r[4 * c + 2]), "=r"(r[4 * c + 3])
                 : "r"(address + c * 2048) : "memory");
}
__device__ __forceinline__ void zero_rows_from(void* tile, int first, int panels) {
  unsigned thread = thread_index();
#pragma unroll 1
  for (int panel = 0; panel < panels; ++panel)
#pragma unroll 1
    for (int byte = first * 128 + (thread & 127) * 16; byte < 64 * 128; byte += 128 * 16)
      *(uint4*)((char*)tile + panel * 64 * 128 + byte) = make_uint4(0, 0, 0, 0);
}
}  // namespace flash_qla
"""

COLUMNS_SOURCE = _lean_function(
    "store_part",
    "store_columns(void* tile, void const* fragment, int part)",
    "unsigned const* r = (unsigned const*)fragment + 16 * part;",
    _STORE,
)
STORE_SOURCE = _lean_function(
    "store_tile",
    "store_tile_lean(void* tile, void const* fragment)",
    "unsigned const* r = (unsigned const*)fragment;",
    _STORE,
)
READ_SOURCE = _lean_function(
    "load_tile", "load_tile_lean(void* fragment, void const* tile)", "unsigned* r = (unsigned*)fragment;", _LOAD
)


def load_tile_transposed(fragment, ring, stage):
    """Call expression: fragment = transpose of ring[stage], 64 columns wide."""
    # access_ptr, not address_of: TileLang takes the latter for a possible store and fences the next wgmma.
    tile = ring.access_ptr("r", offset=stage * (64 * 64))
    return T.call_extern("void", "flash_qla::load_transposed", fragment.access_ptr("w"), tile)


def store_tile_unfenced(ring, stage, fragment):
    """Call expression: ring[stage] = fragment, 64 columns wide, for a ring that no product of the storing role reads.

    "r" although it stores: TileLang would fence that role's next wgmma. The caller fences before it hands over.
    """
    tile = ring.access_ptr("r", offset=stage * (64 * 64))
    return T.call_extern("void", "flash_qla::store_tile_lean", tile, fragment.access_ptr("r"))


def store_ring_columns(ring, slot, fragment, part):
    """Call expression: columns 64 part to 64 part + 63 of ring[slot] = those of fragment, 64 rows (COLUMNS_SOURCE)."""
    target = ring.access_ptr("r", offset=slot * (64 * int(ring.shape[2])) + part * 64)
    return T.call_extern("void", "flash_qla::store_columns", target, fragment.access_ptr("r"), part)


def load_tile_unfenced(fragment, ring, stage):
    """Call expression: fragment = ring[stage], 64 columns wide, without TileLang's fence before the next wgmma."""
    tile = ring.access_ptr("r", offset=stage * (64 * 64))
    return T.call_extern("void", "flash_qla::load_tile_lean", fragment.access_ptr("w"), tile)


def store_panel_unfenced(ring, stage, fragment, col):
    """`store_tile_unfenced` into the 64 columns from col on of a ring with more of them (STORE_SOURCE, LEAN_SOURCE)."""
    tile = ring.access_ptr("r", offset=stage * (64 * int(ring.shape[2])) + col)
    return T.call_extern("void", "flash_qla::store_tile_lean", tile, fragment.access_ptr("r"))
