"""Runs the host code that TileLang generates for a kernel, against stand-ins for the CUDA driver.

It is C: compiled with the C compiler and called with CPU tensors that claim to be on a GPU, it makes all its checks of
shapes, strides and dtypes, and hands over the tensor maps and the launch as it would on a GPU.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from .machine import Machine
from .memory import Memory, Region, TensorMap
from .program import PARAM

HEADER = r"""
#pragma once
#include <stdint.h>
#include <stddef.h>
typedef struct { int32_t device_type, device_id; } DLDevice;
typedef struct { uint8_t code, bits; uint16_t lanes; } DLDataType;
typedef struct {
  void* data; DLDevice device; int32_t ndim; DLDataType dtype; int64_t* shape; int64_t* strides; uint64_t byte_offset;
} DLTensor;
typedef struct {
  int32_t type_index; uint32_t zero_padding;
  union { int64_t v_int64; double v_float64; void* v_ptr; };
} TVMFFIAny;
enum { kTVMFFINone = 0 };
typedef int (*call_t)(const char*, TVMFFIAny*, int32_t);
typedef void (*error_t)(const char*, const char*);
__attribute__((weak)) call_t on_call;
__attribute__((weak)) error_t on_error;
static inline int TVMBackendGetFuncFromEnv(void* context, const char* name, void** out) {
  *out = (void*)name;
  return 0;
}
static inline int TVMFFIFunctionCall(void* function, TVMFFIAny* args, int32_t n, TVMFFIAny* result) {
  return on_call((const char*)function, args, n);
}
static inline void TVMFFIErrorSetRaisedFromCStr(const char* kind, const char* message) { on_error(kind, message); }
"""
INCLUDED = ("tvm/runtime/base.h", "tvm/runtime/c_backend_api.h", "tvm/ffi/c_api.h")
INT, FLOAT, TENSOR = 1, 3, 7  # TVMFFITypeIndex
DTYPES = {torch.int32: (0, 32), torch.int64: (0, 64), torch.float16: (2, 16), torch.float32: (2, 32),
          torch.float64: (2, 64), torch.bfloat16: (4, 16)}  # fmt: skip
ITEM_SIZES = {0: 1, 1: 2, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 8, 9: 2}  # CUtensorMapDataType
CUDA = 2  # DLDeviceType


class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("id", ctypes.c_int32)]


class _DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device", _Device), ("ndim", ctypes.c_int32), ("dtype", _DataType),
                ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
                ("byte_offset", ctypes.c_uint64)]  # fmt: skip


class _Value(ctypes.Union):
    _fields_ = [("integer", ctypes.c_int64), ("real", ctypes.c_double), ("pointer", ctypes.c_void_p)]


class _Any(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("padding", ctypes.c_uint32), ("value", _Value)]


_Call = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(_Any), ctypes.c_int32)
_Error = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)


def compile_host(source: str) -> ctypes.CDLL:
    """Compiles a host stub's source; the library stays loaded, its file does not."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise RuntimeError("no C compiler was found")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in INCLUDED:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(HEADER)
        name = hashlib.sha256(source.encode()).hexdigest()[:16]
        (root / f"{name}.c").write_text(source)
        command = [compiler, "-O0", "-w", "-shared", "-fPIC", "-I", folder, f"{name}.c", "-o", f"{name}.so", "-lm"]
        subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
        return ctypes.CDLL(str(root / f"{name}.so"))


@dataclass
class Launch:
    """What the host code launched: kernel arguments [(type, number)], tensor maps by their address, grid, threads."""

    arguments: list[tuple[int, int | float]] = field(default_factory=list)
    maps: dict[int, list[int]] = field(default_factory=dict)  # address → what followed it in the call


class HostError(RuntimeError):
    """The host code refused the arguments."""


def _value(each: _Any):
    if each.type == FLOAT:
        return each.type, each.value.real
    return each.type, (each.value.integer if each.type == INT else (each.value.pointer or 0))


def _describe(tensor: torch.Tensor, keep: list) -> _Tensor:
    axes = tensor.dim()
    shape, strides = ((ctypes.c_int64 * axes)(*x) for x in (tensor.shape, tensor.stride()))
    code, bits = DTYPES[tensor.dtype]
    found = _Tensor(tensor.data_ptr(), _Device(CUDA, 0), axes, _DataType(code, bits, 1), shape, strides, 0)
    keep += [shape, strides, found]
    return found


class CompiledKernel:
    """A kernel, called like TileLang's compiled function, on CPU tensors.

    Args:
        machine: of its PTX.
        host_source: TileLang's host stub.
    """

    def __init__(self, machine: Machine, host_source: str):
        self.machine = machine
        self._library = compile_host(host_source)

    def __call__(self, *arguments) -> None:
        launch = self._run_host(arguments)
        regions = [self.region(x) for x in arguments if isinstance(x, torch.Tensor) and x.numel()]
        count = len(self.machine.program.parameters)
        values, rest = launch.arguments[:count], [value for _, value in launch.arguments[count:]]
        if len(rest) not in (4, 5) or rest[2:4] != [1, 1]:
            raise NotImplementedError(f"launched with {rest}")
        grid, threads, shared = rest[0], rest[1], rest[4] if len(rest) == 5 else 0
        data = np.zeros(-(-self.machine.program.parameter_bytes // 16) * 16, np.uint8)
        maps = {}
        for parameter, (type_, value) in zip(self.machine.program.parameters, values):
            if parameter.size == 128:
                maps[PARAM + parameter.offset] = self._tensor_map(launch.maps[value], regions)
                continue
            raw = np.float32(value).tobytes() if type_ == FLOAT else value.to_bytes(8, "little", signed=value < 0)
            data[parameter.offset : parameter.offset + parameter.size] = np.frombuffer(raw, np.uint8)[: parameter.size]
        self.machine.launch(Memory(regions, data), maps, grid, threads, shared)

    @staticmethod
    def region(x: torch.Tensor) -> Region:
        """The memory that a tensor spans."""
        last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride()))
        return Region.of_host(x.data_ptr(), (last + 1) * x.element_size())

    @staticmethod
    def _tensor_map(words: list[int], regions: list[Region]) -> TensorMap:
        dtype, axes, address = words[:3]
        shape, strides, box, steps = (words[3 + i * axes : 3 + (i + 1) * axes] for i in range(4))
        interleave, swizzle = words[3 + 4 * axes : 5 + 4 * axes]
        if interleave or set(steps) != {1}:
            raise NotImplementedError(f"tensor map {words}")
        region = next((r for r in regions if r.start <= address < r.end), None)
        if region is None:
            raise ValueError(f"TMA: no argument holds the address {address:#x}")
        found = TensorMap(region, address, ITEM_SIZES[dtype], shape, strides, box, swizzle)
        found.check()
        return found

    def _run_host(self, arguments) -> Launch:
        launch, errors, keep = Launch(), [], []

        def on_call(name, args, count):
            values = [_value(args[i]) for i in range(count)]
            if name == b"__tvm_tensormap_create_tiled":
                launch.maps[values[0][1]] = [value for _, value in values[1:]]
            elif name != b"__tvm_set_device":
                launch.arguments = values
            return 0

        def on_error(kind, message):
            errors.append(f"{kind.decode()}: {message.decode()}")

        callbacks = _Call(on_call), _Error(on_error)
        for name, callback in zip(("on_call", "on_error"), callbacks):
            ctypes.c_void_p.in_dll(self._library, name).value = ctypes.cast(callback, ctypes.c_void_p).value
        given = (_Any * len(arguments))()
        for slot, x in zip(given, arguments):
            if isinstance(x, torch.Tensor):
                slot.type = TENSOR
                slot.value.pointer = ctypes.addressof(_describe(x, keep))
            elif isinstance(x, float):
                slot.type, slot.value.real = FLOAT, x
            else:
                slot.type, slot.value.integer = INT, x
        failed = self._library["__tvm_ffi_main"](None, given, len(arguments), None)
        if failed or errors:
            raise HostError("; ".join(errors) or "the host code failed")
        return launch
