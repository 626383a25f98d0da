"""Replay: what a call did, kept by its metadata, so that an equal call allocates and launches at once.

A call on a few thousand tokens takes the GPU less time than Python needs to validate the arguments, look up the plan
and build the launches, all of which depend on metadata alone: shapes, strides, alignment, dtypes, devices, options and
environment variables, never on a tensor's values. So the second call with equal metadata is recorded (recording costs
half a millisecond, and many calls never come again): its allocations and its kernels' arguments. It can be replayed
when every argument is a number, an input, a tensor that the call allocated, or a view of one of these, and nothing but
kernels touched data (a copy for an input that TMA cannot read, say, is such a thing). Later calls with equal metadata
then make the same allocations and launches, on their own tensors.

A call with gradients is recorded in two parts, forward and backward, inside its autograd node (`autograd.py`), which is
made anew for each call. Not recorded: calls on the host's offsets (`cu_seqlens_cpu`, or `cu_seqlens` on the CPU: the
plan depends on their values), and everything that `interface.py` does not hand over.
"""

from __future__ import annotations

from contextlib import contextmanager

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from flash_qla import env

MAX_KNOWN = 2048
_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
_OPTIONS = frozenset((bool, int, float, type(None), torch.dtype))
_ONCE, _NEVER = object(), object()

_known: dict[tuple, object] = {}


def key_of(tensors, options) -> tuple | None:
    """Returns what a call's launches depend on; None for a call that is not to be recorded.

    Args:
        tensors: q, k, v, g, beta, initial_state, cu_seqlens, …; those after q may be None.
        options: further values that decide.

    Equal metadata takes the same path through the package whatever the values are. Part of it: whether autograd will
    want the call's gradients, and inference mode.
    """
    first, types = tensors[0], (*map(type, options),)
    if type(first) not in _TENSORS or not _is_current(first.device) or torch.compiler.is_compiling():
        return None
    if forward_ad._current_level >= 0:  # kernels know no tangents: the call must come to where that is refused
        return None
    variables = env.deciding()
    if not _OPTIONS.issuperset(types) or torch.is_autocast_enabled("cuda") or (variables[2] and env.debug()):
        return None
    key, tracks, with_gradients = [*options, *types, *variables], torch.is_grad_enabled(), False
    try:
        for x in tensors:
            if x is None:
                key.append(None)
            elif type(x) not in _TENSORS:
                return None
            elif x.is_neg():
                return None
            else:
                key += x.shape, x.stride(), x.dtype, x.device, x.data_ptr() & 15
                with_gradients |= tracks and x.requires_grad
    except RuntimeError:  # a sparse tensor, or one without memory
        return None
    key += with_gradients, torch.is_inference_mode_enabled()
    return tuple(key)


def _is_current(device) -> bool:
    """Whether kernels launched without further ado run there."""
    return device.type == "cuda" and torch.cuda.current_device() == device.index


def find(key: tuple) -> Replay | None:
    """Returns the recorded call with this key."""
    found = _known.get(key)
    return found if type(found) is Replay else None


def forget() -> None:
    """Forgets every recorded call."""
    _known.clear()


class _Watch(TorchDispatchMode):
    """Notes the allocations of a call, and whether it did anything to data outside kernels."""

    ALLOCATE = ("aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided", "aten::new_empty_strided")
    VIEW = ("aten::view", "aten::as_strided", "aten::transpose", "aten::slice", "aten::alias", "aten::detach",
            "aten::select", "aten::unsqueeze", "aten::squeeze", "aten::expand", "aten::permute", "aten::_unsafe_view",
            "aten::view_as", "aten::lift_fresh", "aten::t")  # fmt: skip

    def __init__(self):
        super().__init__()
        self.allocated, self.touched_data = [], False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result, name = func(*args, **(kwargs or {})), func._schema.name
        if name in self.ALLOCATE:
            self.allocated.append(result)
        elif name not in self.VIEW:
            self.touched_data = True
        return result


class Replay:
    """One recorded call.

    Attributes:
        allocations: (shape, strides, dtype, device) of each tensor to allocate.
        views: (number of the tensor that it views, size, stride, elements from its start, dtype).
        launches: (kernel, arguments, [(place in the arguments, number of the tensor)]).
        results: numbers of the tensors to return, None for None.
        context: what the caller left with the results: whatever else it needs to go on from them.

    Tensors are numbered: the inputs, then allocations, then views.
    """

    def __init__(self, allocations, views, launches, results, context):
        self.allocations, self.views, self.launches, self.results = allocations, views, launches, results
        self.context = context

    def __call__(self, *inputs):
        """Allocates and launches on the current stream; returns the results."""
        tensors = list(inputs)
        for shape, strides, dtype, device in self.allocations:  # torch.empty takes 3 us longer to read its arguments
            tensors.append(torch.empty_strided(shape, strides, dtype=dtype, device=device))
        for base, size, stride, start, dtype in self.views:
            base = tensors[base]
            if dtype is not None:
                base = base.view(dtype)
            tensors.append(base.as_strided(size, stride, base.storage_offset() + start))
        for kernel, arguments, places in self.launches:
            arguments = arguments.copy()
            for place, number in places:
                arguments[place] = tensors[number]
            kernel(*arguments)
        return tuple([None if number is None else tensors[number] for number in self.results])


class Results(list):
    """What a recorded call returns, tensors or None, in order; `context`: see `Replay`, no tensors in it."""

    context: object = None


@contextmanager
def recording(key: tuple | None, inputs):
    """Context that records what happens inside under `key`, if that was seen once before.

    Its value is the `Results` into which the caller puts what it returns.
    """
    results = Results()
    if key is None or not _told_apart(inputs):
        yield results
    elif key not in _known:
        if len(_known) >= MAX_KNOWN:
            _known.clear()
        _known[key] = _ONCE
        yield results
    elif _known.get(key) is _ONCE:
        with _record(key, inputs, results):
            yield results
    else:
        yield results


def _told_apart(inputs) -> bool:
    """Whether each input is one tensor on the device: of one given twice, which is which? The host's offsets decide."""
    given = [x for x in inputs if x is not None]
    return len({id(x) for x in given}) == len(given) and all(x.device == given[0].device for x in given)


@contextmanager
def _record(key, inputs, results):
    from .kernels.build import record_launches

    watch = _Watch()
    with record_launches() as launches, watch:
        yield
    made = None if watch.touched_data else _make(inputs, watch.allocated, launches, results)
    _known[key] = _NEVER if made is None else made


def _make(inputs, allocated, launches, results) -> Replay | None:
    """Returns the replay of a recorded call; None when an argument's origin is not plain."""
    if not launches or not all(x.is_contiguous() for x in allocated):
        return None
    numbered, views = [*inputs, *allocated], []
    first_view = len(numbered)

    def number_of(x) -> int | None:
        for number, other in enumerate(numbered):
            if other is x:
                return number
        origins = [n for n, other in enumerate(numbered[:first_view]) if other is not None and _is_view(x, other)]
        if len(origins) != 1:
            return None
        base = numbered[origins[0]]
        if (x.data_ptr(), x.shape, x.stride(), x.dtype) == (base.data_ptr(), base.shape, base.stride(), base.dtype):
            return origins[0]
        dtype = None if x.dtype == base.dtype else x.dtype
        start = x.storage_offset() - (base if dtype is None else base.view(dtype)).storage_offset()
        views.append((origins[0], x.shape, x.stride(), start, dtype))
        numbered.append(x)
        return len(numbered) - 1

    steps = []
    for _, kernel, arguments in launches:
        kept, places = list(arguments), []
        for place, x in enumerate(arguments):
            if isinstance(x, torch.Tensor) and x.numel() > 0:
                number = number_of(x)
                if number is None:
                    return None
                kept[place] = None
                places.append((place, number))
        steps.append((kernel, kept, places))
    numbers = [None if x is None else number_of(x) for x in results]
    if any(number is None and x is not None for number, x in zip(numbers, results)):
        return None
    made = [(x.shape, x.stride(), x.dtype, inputs[0].device) for x in allocated]
    return Replay(made, views, steps, numbers, results.context)


def _is_view(x, base) -> bool:
    """Whether x lies within the memory of base's own elements, as base or a view of it."""
    start, first = x.data_ptr(), base.data_ptr()
    end = first + _extent(base)
    return base.numel() > 0 and first <= start and start + _extent(x) <= end and not start % base.element_size()


def _extent(x) -> int:
    """Bytes from a tensor's first to its last element."""
    return (1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride()))) * x.element_size()
