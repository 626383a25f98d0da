"""Numbers that every implementation of the operator shares."""

CHUNK_SIZE = 64
# A gate below this acts as a reset; clamping before the cumsum keeps its fp32 precision (README, equation F0).
GATE_FLOOR = -100.0
# Inside the root, so that an all-zero row (padding) has a finite norm and gradient.
L2NORM_EPS = 1e-6
# Of the forward's kernels, by the operands' type. Largest |g_cumsum|, natural log, of a mild chunk: solve and the walk
# decide by it alike.
MILD = {"bfloat16": 16.5, "float16": 1.25}
# Largest |log2| of a mild chunk's factors: far from the operand type's ends, whatever V's magnitude. More than twice
# MILD: the walk's scale is renormalised where it exceeds half of this.
MILD_LOG2 = {"bfloat16": 48.0, "float16": 4.0}
