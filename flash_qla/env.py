"""Every environment variable of the package: its default, its meaning, and the one function that reads it.

Values are read at use, so a test or a server may change them between calls. One that is empty counts as not set.
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
    """Returns the variable's current value, or its default where it is not set or empty.

    Unknown names raise KeyError (a typo in our code).
    """
    default = VARIABLES[name][0]
    # os.environ raises and catches an error for a variable that is not set: 3 us, several of them a call.
    held = getattr(os.environ, "_data", None)
    if held is not None and _KEYS[name] not in held:
        return default
    return os.environ.get(name) or default


_BACKEND, _TOLERANCE, _DEBUG = (_KEYS[f"FLASH_QLA_{name}"] for name in ("BACKEND", "CP_TOLERANCE", "DEBUG"))


def deciding() -> tuple:
    """Returns what decides how a call runs: backend, tolerance, debug. To be compared: the form is not promised.

    A third of the time of as many `read`s; falsy where a variable is not set.
    """
    held = getattr(os.environ, "_data", None)
    if held is None:
        held = {_KEYS[name]: value for name, value in os.environ.items() if name in _KEYS}
    return held.get(_BACKEND), held.get(_TOLERANCE), held.get(_DEBUG)


def _is_on(name: str) -> bool:
    """Returns a switch's position. Raises ValueError for a value that is neither on nor off."""
    value = read(name)
    if value == "0":
        return False
    if value.lower() in ("1", "true", "on", "yes"):
        return True
    if value.lower() in ("false", "off", "no"):
        return False
    raise ValueError(f"{name}={value!r} is not supported; it must be 0 or 1")


def backend() -> str:
    """Returns FLASH_QLA_BACKEND. Raises ValueError for a value that is not supported."""
    value = read("FLASH_QLA_BACKEND")
    if value not in BACKENDS:
        raise ValueError(f"FLASH_QLA_BACKEND={value!r} is not supported; it must be one of {', '.join(BACKENDS)}")
    return value


def debug() -> bool:
    return _is_on("FLASH_QLA_DEBUG")


def print_plan() -> bool:
    return _is_on("FLASH_QLA_PRINT_PLAN")


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
