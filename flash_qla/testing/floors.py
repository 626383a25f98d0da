"""The two floors of a call: operations that it must do and bytes that it must move, counted from the shapes.

Counted from the equations of `ops/gated_delta_rule/README.md` with whole chunks of C rows: no schedule does fewer
operations without another algorithm. Bytes: each input read once, each output written once; what a pass hands from one
kernel to the next through memory is listed apart.
"""

from __future__ import annotations

from dataclasses import dataclass

from flash_qla.ops.gated_delta_rule.chunk.constants import CHUNK_SIZE
from flash_qla.testing.workloads import Workload

PASSES = ("fwd", "bwd", "fwdbwd")


@dataclass(frozen=True)
class Floors:
    """Attributes: flops, min_bytes (inputs and outputs), handed_bytes (between kernels: T; S and dS of each chunk)."""

    flops: float
    min_bytes: float
    handed_bytes: float

    def __add__(self, other: Floors) -> Floors:
        return Floors(
            self.flops + other.flops, self.min_bytes + other.min_bytes, self.handed_bytes + other.handed_bytes
        )

    def times_ms(self, tflops: float, bytes_per_s: float) -> tuple[float, float, float]:
        """Returns ms of the operations, of min_bytes, and of min_bytes and handed_bytes together."""
        return (
            self.flops / tflops / 1e9,
            self.min_bytes / bytes_per_s * 1e3,
            (self.min_bytes + self.handed_bytes) / bytes_per_s * 1e3,
        )


def num_chunks(workload: Workload) -> int:
    """Chunks of all sequences; a ragged one counts whole."""
    lengths = workload.lengths
    lengths = [lengths[1]] * lengths[0] if isinstance(lengths, tuple) else lengths
    return sum(-(-length // CHUNK_SIZE) for length in lengths)


def input_bytes(workload: Workload, element_size: int = 2, gate_size: int = 4, state_size: int = 4) -> int:
    """Bytes of q, k, v, g, beta and the initial state."""
    return _sizes(workload, element_size, gate_size, state_size)["inputs"]


def _sizes(workload, element_size, gate_size, state_size) -> dict[str, int]:
    tokens, heads_k, heads_v = workload.num_tokens, workload.num_k_heads, workload.num_v_heads
    dim_k, dim_v = workload.head_dim_k, workload.head_dim_v
    num_seqs = workload.lengths[0] if isinstance(workload.lengths, tuple) else len(workload.lengths)
    qk, values = 2 * tokens * heads_k * dim_k * element_size, tokens * heads_v * dim_v * element_size
    gates, state = 2 * tokens * heads_v * gate_size, num_seqs * heads_v * dim_k * dim_v * state_size
    return {
        "qk": qk,
        "values": values,
        "gates": gates,
        "state": state,
        "inputs": qk + values + gates + state,
        "inverse": tokens * heads_v * CHUNK_SIZE * element_size,
        "chunk_states": num_chunks(workload) * heads_v * dim_k * dim_v * element_size,
    }


def floors(workload: Workload, passes: str | None = None, *, element_size=2, gate_size=4, state_size=4) -> Floors:
    """Returns the floors of a pass with an initial and a final state.

    Args:
        passes: "fwd", "bwd" or "fwdbwd"; the workload's own if None.
        element_size, gate_size, state_size: bytes of q/k/v, of g/beta, of the states.

    Raises:
        ValueError: an unknown pass.
    """
    passes = passes or workload.passes
    if passes not in PASSES:
        raise ValueError(f"passes={passes!r} is not one of {', '.join(PASSES)}")
    if passes == "fwdbwd":
        sizes = {"element_size": element_size, "gate_size": gate_size, "state_size": state_size}
        return floors(workload, "fwd", **sizes) + floors(workload, "bwd", **sizes)
    chunk, dim_k, dim_v = CHUNK_SIZE, workload.head_dim_k, workload.head_dim_v
    # Multiply-adds of one product: state-sized, and inside the chunk with a value or a key operand.
    state, inner_v, inner_k = chunk * dim_k * dim_v, chunk * chunk * dim_v, chunk * chunk * dim_k
    size = _sizes(workload, element_size, gate_size, state_size)
    if passes == "fwd":
        # K S, Q S, Kᵀ(e Vd); T W, P Vd; the inverse. Per key head: K Kᵀ, Q Kᵀ.
        per_v_head, per_k_head = 3 * state + 2 * inner_v + chunk**3 // 6, 2 * inner_k
        min_bytes = size["inputs"] + size["values"] + size["state"]
        handed = 2 * size["inverse"]
    else:
        forward_states = 2 * state + inner_v  # K S, Kᵀ(e Vd); T W
        reverse_states = 3 * state + 2 * inner_v  # K dS', Qᵀ(Γ dO), Kᵀ(Γ dR); Pᵀ dO, Tᵀ dVd
        # K S, K dS', dO Sᵀ, dR Sᵀ, Vd dS'ᵀ; T W, Pᵀ dO, Tᵀ dVd, dO Vdᵀ, X Vdᵀ; dPg K, dM K, dPgᵀ Q, dMᵀ K
        gradients = 5 * state + 5 * inner_v + 4 * inner_k
        per_v_head, per_k_head = forward_states + reverse_states + gradients, 2 * inner_k
        min_bytes = 2 * (size["inputs"] + size["state"]) + size["values"] + size["inverse"]  # do; dht and dh0
        handed = 4 * size["chunk_states"]  # S and dS of every chunk, written and read
    madds = num_chunks(workload) * (workload.num_v_heads * per_v_head + workload.num_k_heads * per_k_head)
    return Floors(2.0 * madds, float(min_bytes), float(handed))
