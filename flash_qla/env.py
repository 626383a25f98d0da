"""Every environment variable of the package: its default, its meaning, and the one function that reads it.

Values are read at use, so a test or a server may change them between calls.
"""

import os

BACKENDS = ("auto", "reference", "kernels")

VARIABLES = {
    "FLASH_QLA_BACKEND": (
        "auto",
        "auto: kernels where the GPU, dtypes and head sizes allow it, PyTorch elsewhere (one warning on a GPU). "
        "kernels: never PyTorch; what the kernels do not cover raises NotImplementedError. reference: always PyTorch.",
    ),
    "FLASH_QLA_DEBUG": (
        "0",
        "1: also check values (cu_seqlens starts at 0, never falls and ends within T; no NaN in the inputs). "
        "Reads the device, so it synchronises.",
    ),
    "FLASH_QLA_CP_TOLERANCE": (
        "-12",
        "Natural log of the largest transition norm that a segment may drop when a sequence is split inside the card. "
        "Smaller is more exact and costs longer warm-ups.",
    ),
    "FLASH_QLA_PRINT_PLAN": ("0", "1: print each new plan of the context-parallel planner with predicted times."),
}


_KEYS = {name: getattr(os.environ, "encodekey", str)(name) for name in VARIABLES}


def read(name: str) -> str:
    """Returns the variable's current value, or its default. Unknown names raise KeyError (a typo in our code)."""
    default = VARIABLES[name][0]
    # os.environ raises and catches an error for a variable that is not set: 3 us, several of them a call.
    held = getattr(os.environ, "_data", None)
    if held is not None and _KEYS[name] not in held:
        return default
    return os.environ.get(name, default)


def backend() -> str:
    """Returns FLASH_QLA_BACKEND. Raises ValueError for a value that is not supported."""
    value = read("FLASH_QLA_BACKEND")
    if value not in BACKENDS:
        raise ValueError(f"FLASH_QLA_BACKEND={value!r} is not supported; it must be one of {', '.join(BACKENDS)}")
    return value


def debug() -> bool:
    return read("FLASH_QLA_DEBUG") not in ("", "0")


def print_plan() -> bool:
    return read("FLASH_QLA_PRINT_PLAN") not in ("", "0")


def cp_tolerance() -> float:
    """Returns FLASH_QLA_CP_TOLERANCE (natural log). Raises ValueError when it is not a negative number."""
    text = read("FLASH_QLA_CP_TOLERANCE")
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value < 0:
        raise ValueError(f"FLASH_QLA_CP_TOLERANCE={text!r} must be a negative number (natural log of a norm)")
    return value
