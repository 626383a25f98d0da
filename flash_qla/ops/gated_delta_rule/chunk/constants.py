"""Numbers that every implementation of the operator shares."""

CHUNK_SIZE = 64
# A gate below this acts as a reset; clamping before the cumsum keeps its fp32 precision (README, equation F0).
GATE_FLOOR = -100.0
# Inside the root, so that an all-zero row (padding) has a finite norm and gradient.
L2NORM_EPS = 1e-6
