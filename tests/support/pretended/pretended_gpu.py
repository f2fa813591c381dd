"""A GPU that is not there: tensors of device `cuda` whose numbers lie in memory and are computed by the CPU.

What it is for: the ways that only a GPU takes (placement, pinned copies, streams, a whole step as a CUDA graph, fp16
with its scaler) run on any machine, and fail where a GPU's would: a tensor of the CPU among those of the device, a wait
of the host or a number of the host's in a graph. What it cannot show: speed, races between streams, CUDA's own kernels,
compilers and libraries; that is what the tests in tests/gpu are for.

A graph holds the operations that were called while it was captured; none of them has had an effect by its end. A replay
computes them again on the same tensors, as CUDA does at the same addresses.
"""

import threading
import time
import warnings
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from pretended_nvml import MEMORY_BYTES, NAME
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

DEVICE = torch.device("cuda", 0)
ON_HOST = {"device": torch.device("cpu"), "pin_memory": False}
"""Where the numbers really are."""
_aten = torch.ops.aten
_MAY_MIX = {  # operations that take tensors of two devices
    _aten.copy_.default,
    _aten._copy_from.default,
    _aten.index.Tensor,
    _aten._index_put_impl_.default,
    _aten.index_put_.default,
    _aten.index_put.default,
}
_WAITS = {_aten._local_scalar_dense.default, _aten.nonzero.default, _aten.equal.default, _aten.masked_select.default}
"""Operations whose answer the host has to wait for."""


class CudaError(RuntimeError):
    """What CUDA would say."""


class Pretended(torch.Tensor):
    """A tensor of the device; `inner` holds its numbers."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.data.__set__:  # C++ takes over the metadata alone
            with torch._C.DisableTorchFunctionSubclass():
                func(*args)
            args[0].inner = args[1].inner
            return None
        if func is torch.Tensor.tolist:
            _wait_unasked("tolist")
            return args[0].inner.tolist()
        if func is torch.Tensor.is_pinned:
            return False
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _call(func, args, kwargs or {})

    def __repr__(self, **_):
        return f"Pretended({self.inner!r})"

    def __deepcopy__(self, memo):
        if id(self) in memo:
            return memo[id(self)]
        with torch.no_grad():
            copied = self.detach().clone()
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, self.requires_grad)
        else:
            copied.requires_grad_(self.requires_grad)
        if self.grad is not None:
            copied.grad = self.grad.__deepcopy__(memo)
        memo[id(self)] = copied
        return copied


def _call(func, args, kwargs):
    """Compute an operation with a tensor of the device in it."""
    target = kwargs.get("device")
    kwargs = kwargs | {name: value for name, value in ON_HOST.items() if name in kwargs}
    flat, tree = tree_flatten((args, kwargs))
    _check_devices(func, flat)
    stays = target is None or torch.device(target).type == "cuda"
    if func in _WAITS or not stays or _is_read(func, args):
        _wait_unasked(func)
    recording = _state.recording
    if recording is not None:
        recording.check_inputs(func, flat)
        recording.keep(func, flat)
    owners = {id(one.inner): one for one in flat if isinstance(one, Pretended)}
    began = time.perf_counter()
    inner_args, inner_kwargs = tree_unflatten([one.inner if isinstance(one, Pretended) else one for one in flat], tree)
    found = func(*inner_args, **inner_kwargs)
    if recording is None:
        _note_kernel(began)
    else:
        recording.add(func, inner_args, inner_kwargs, found)
    if not stays:
        return found
    return tree_map_only(torch.Tensor, lambda one: owners[id(one)] if id(one) in owners else Pretended(one), found)


def _is_read(func, args):
    """Whether numbers go from the device into a tensor of the CPU."""
    return func is _aten.copy_.default and not isinstance(args[0], Pretended)


def _check_devices(func, flat):
    if func in _MAY_MIX or func is _aten._to_copy.default:
        return
    for one in flat:
        if isinstance(one, torch.Tensor) and not isinstance(one, Pretended) and one.dim() > 0:
            raise CudaError(f"{func}: expected all tensors on one device, found {DEVICE} and cpu {tuple(one.shape)}")


def _wait(func):
    if _state.recording is not None:
        raise CudaError(f"{func}: the host waits for the device while a graph is captured")


def _wait_unasked(func):
    """An operation waits of itself, which the host can ask to be told."""
    _wait(func)
    if _state.sync_debug_mode == "warn":
        warnings.warn(f"called a synchronizing CUDA operation: {func}", stacklevel=3)


def _note_kernel(began):
    if _state.kernels is not None:
        _state.kernels.append((began * 1e6, time.perf_counter() * 1e6))


class _State:
    """Of the device."""

    def __init__(self):
        self.recording = None
        self.stream = threading.local()
        self.sync_debug_mode = "default"
        self.kernels = None
        """(start, end) in microseconds of each; None while nobody profiles."""


_state = _State()


class Stream:
    """Work is done when it is called, so that streams have nothing to do but to be the same ones."""

    def __init__(self, device=None, priority=0):
        self.device = torch.device(device) if device is not None else DEVICE
        self.device_index = 0

    def wait_stream(self, stream):
        """Of the same kind."""
        assert isinstance(stream, Stream)

    def wait_event(self, event):
        """One that was recorded."""
        assert event.stream is not None

    def record_event(self, event=None):
        """Mark a place in this stream."""
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self):
        """Wait for it."""
        _wait("Stream.synchronize")

    def query(self):
        """Whether all is done."""
        return True


class Event:
    """A mark in a stream."""

    def __init__(self, enable_timing=False, blocking=False, interprocess=False):
        self.stream = None

    def record(self, stream=None):
        """Put it there."""
        self.stream = stream or current_stream()

    def synchronize(self):
        """Wait for it, as no graph may."""
        assert self.stream is not None
        _wait("Event.synchronize")

    def wait(self, stream=None):
        """Have a stream wait."""
        assert self.stream is not None

    def query(self):
        """Whether it was passed."""
        return True

    def elapsed_time(self, other):
        """Milliseconds."""
        return 1e-3


_DEFAULT_STREAM = Stream()


def current_stream(device=None):
    """Of this thread."""
    return getattr(_state.stream, "current", _DEFAULT_STREAM)


@contextmanager
def stream(chosen):
    """Work goes there."""
    before = current_stream()
    _state.stream.current = chosen or before
    try:
        yield
    finally:
        _state.stream.current = before


class CUDAGraph:
    """Operations that were captured."""

    def __init__(self, keep_graph=False):
        self._calls = []
        self._made = {}
        """By address of their memory, the tensors that the capture has made; kept, so that no address comes again."""
        self._before = {}
        """By address, what the tensors that were there before the capture held."""
        self.is_captured = False

    def check_inputs(self, func, flat):
        """A graph would keep what the host had."""
        host = [one for one in flat if isinstance(one, torch.Tensor) and not isinstance(one, Pretended)]
        if any(tensor.dim() > 0 for tensor in host) or (host and func in _MAY_MIX):
            raise CudaError(f"{func}: memory of the host that is not pinned is copied while a graph is captured")

    def keep(self, func, flat):
        """What an operation in place is about to change, to put it back at the end."""
        if not func._schema.is_mutable:
            return
        for one in flat:
            if isinstance(one, Pretended):
                address = one.inner.untyped_storage().data_ptr()
                if address not in self._made and address not in self._before:
                    storage = one.inner.untyped_storage()
                    self._before[address] = (storage, storage.clone())

    def add(self, func, args, kwargs, found):
        """Record what was called."""
        self._calls.append((func, args, kwargs, found))
        given = {
            one.untyped_storage().data_ptr() for one in tree_flatten((args, kwargs))[0] if isinstance(one, torch.Tensor)
        }
        for one in tree_flatten(found)[0]:
            if isinstance(one, torch.Tensor) and one.untyped_storage().data_ptr() not in given:
                self._made[one.untyped_storage().data_ptr()] = one

    def end(self):
        """Nothing has been computed: put back what was, and spoil what the capture has made."""
        self.is_captured = True
        for storage, before in self._before.values():
            storage.copy_(before)
        for one in self._made.values():
            if one.is_floating_point():
                one.fill_(float("nan"))

    def replay(self):
        """Compute it."""
        assert self.is_captured, "replayed before it was captured"
        began = time.perf_counter()
        for func, args, kwargs, found in self._calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_flatten(found)[0], tree_flatten(again)[0], strict=True):
                is_own = isinstance(old, torch.Tensor) and old.untyped_storage().data_ptr() in self._made
                if is_own and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
        _note_kernel(began)


@contextmanager
def graph(captured, pool=None, stream=None, capture_error_mode="global"):
    """Record what is called on the device inside."""
    assert _state.recording is None
    _state.recording = captured
    try:
        with _on(stream):
            yield
    finally:
        _state.recording = None
    captured.end()


_on = stream


class Profile:
    """As much of torch's profiler as is asked of it: when the device was busy."""

    def __init__(self, activities):
        assert activities == [torch.profiler.ProfilerActivity.CUDA]

    def __enter__(self):
        self._kernels = _state.kernels = []
        return self

    def __exit__(self, *_):
        _state.kernels = None

    def events(self):
        """One for each kernel."""
        kind = torch.autograd.DeviceType.CUDA
        times = (SimpleNamespace(start=start, end=end) for start, end in self._kernels)
        return [SimpleNamespace(device_type=kind, time_range=time_range) for time_range in times]


def _set_sync_debug_mode(mode):
    _state.sync_debug_mode = mode


def _empty(size, *, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    return _new(lambda: torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format))


def _empty_strided(size, stride, *, dtype=None, layout=None, device=None, pin_memory=None):
    return _new(lambda: torch.empty_strided(size, stride, dtype=dtype))


def _new(make):
    made = make()
    if _state.recording is not None:
        _state.recording._made[made.untyped_storage().data_ptr()] = made
    return Pretended(made)


def install():
    """Let torch in this process have one such GPU; once, before anything asks for it."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", _empty, "CUDA")
    library.impl("empty_strided", _empty_strided, "CUDA")
    install.library = library  # lives as long as the process
    torch.__future__.set_swap_module_params_on_conversion(True)  # keeps parameters who they are
    properties = SimpleNamespace(
        name=NAME,
        major=9,
        minor=0,
        total_memory=MEMORY_BYTES,
        multi_processor_count=1,
        warp_size=32,
        gcnArchName="",
    )
    answers = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "_lazy_init": None,
        "init": None,
        "set_device": None,
        "get_device_properties": properties,
        "get_device_name": properties.name,
        "get_device_capability": (9, 0),
        "is_bf16_supported": True,
        "mem_get_info": (MEMORY_BYTES, MEMORY_BYTES),
        "memory_allocated": 1 << 20,
        "max_memory_allocated": 1 << 20,
        "memory_reserved": 1 << 20,
        "reset_peak_memory_stats": None,
        "empty_cache": None,
        "manual_seed": None,
        "manual_seed_all": None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    torch.cuda.synchronize = lambda device=None: _wait("torch.cuda.synchronize")
    torch.cuda.set_sync_debug_mode = _set_sync_debug_mode
    torch.profiler.profile = Profile
    for kind in (Stream, Event, CUDAGraph, graph, stream, current_stream):
        setattr(torch.cuda, kind.__name__, kind)
    torch.Tensor.record_stream = _record_stream
    for name in ("tensor", "as_tensor"):
        setattr(torch, name, _through_host(getattr(torch, name)))


def _record_stream(tensor, stream):
    assert isinstance(tensor, Pretended)
    assert isinstance(stream, Stream)


def _through_host(make):
    """C++ would call a kernel to place the numbers of a list on the device."""

    def made(*args, device=None, **kwargs):
        on_host = make(*args, **kwargs)
        return on_host if device is None else on_host.to(device)

    return made
