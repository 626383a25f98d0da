"""Persistent CTAs: the (chunk, key head) items that one walks, found by one warp and told to the others.

A description is four integers of shared memory: batch row, first token, number of tokens (0: no item is left), head.
"""

from dataclasses import dataclass

import tilelang.language as T

from ...constants import CHUNK_SIZE as C
from . import program

ITEM_STAGES = 4  # descriptions in a ring: the last role may be three items behind


@dataclass
class Items:
    """What a CTA walks: every `step`-th of `total` items from `first`, and what `next_item` needs."""

    first: object
    step: object
    total: object
    group: object
    num_k_heads: object
    cu: object
    cu_step: object
    seq_len: object
    flat_tokens: object
    num_seqs: object


@dataclass
class Work:
    """An item: batch row, first token, number of tokens (0: none is left), key head; all variables."""

    batch: object
    left: object
    count: object
    k_head: object


@T.macro
def put_info(m, row, batch, left, count, head):
    """m.info[row] = a description, by one warp; an arrival publishes it."""
    T.sync_warp()
    if T.get_thread_binding() % 32 == 0:
        m.info[row, 0] = batch
        m.info[row, 1] = left
        m.info[row, 2] = count
        m.info[row, 3] = head


@T.macro
def get_info(m, row, batch: T.Ref, left: T.Ref, count: T.Ref, head: T.Ref):
    """Sets the variables to the description m.info[row]."""
    batch = m.info[row, 0]
    left = m.info[row, 1]
    count = m.info[row, 2]
    head = m.info[row, 3]


@T.macro
def next_item(a: Items, item: T.Ref, slot: T.Ref, n: T.Ref, batch: T.Ref, left: T.Ref, count: T.Ref, k_head: T.Ref):
    """Moves on to the CTA's next item that holds tokens, of sequence n; count is 0 when there is none."""
    chunk, start, length = (T.alloc_var("int32") for _ in range(3))
    count = 0
    while T.And(count <= 0, item + a.step < a.total):
        item = item + a.step
        slot = T.truncdiv(item, a.num_k_heads)
        k_head = item - slot * a.num_k_heads
        program.sequence_of_slot(a.cu, a.cu_step, a.seq_len, a.flat_tokens, a.num_seqs, C, slot, n, chunk)
        program.locate_sequence(a.cu, a.cu_step, a.seq_len, a.flat_tokens, n, batch, start, length)
        left = start + chunk * C
        count = T.min(length - chunk * C, C)
