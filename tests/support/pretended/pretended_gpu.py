"""A GPU that is not there: tensors of device `cuda` whose numbers lie in memory and are computed by the CPU.

What it is for: the ways that only a GPU takes (placement, pinned copies, streams, a whole step as a CUDA graph, fp16
with its scaler) run on any machine, and fail where a GPU's would: a tensor of the CPU among those of the device, a wait
of the host or a number of the host's in a graph. What it cannot show: speed, races between streams, CUDA's own kernels,
compilers and libraries; that is what the tests in tests/gpu are for.

Work is queued. Numbers are computed at once, but each stream knows the time at which a device would have finished its
kernels, each of which takes PRETENDED_KERNEL_MICROSECONDS (1). Whatever waits for the device sleeps until that time and
is counted in `waits`: reads, blocking copies, `synchronize`. As on a GPU only a non-blocking copy from pinned memory
does not wait. That memory must stay as it was until the host has seen the end of the copy, by an event, a stream or a
read after it: whichever sees it compares the bytes.

A graph holds the operations that were called while it was captured; none of them has had an effect by its end. A replay
computes them again on the same tensors, as CUDA does at the same addresses.
"""

import os
import threading
import time
import warnings
from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from pretended_nvml import MEMORY_BYTES, NAME
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

DEVICE = torch.device("cuda", 0)
KERNEL_SECONDS = float(os.environ.get("PRETENDED_KERNEL_MICROSECONDS", "1")) * 1e-6
waits = Counter()
"""How often the host waited for the device, by what made it wait."""
ON_HOST = {"device": torch.device("cpu"), "pin_memory": False}
"""Where the numbers really are."""
_aten = torch.ops.aten
_INDEXING = {
    _aten.index.Tensor,
    _aten._index_put_impl_.default,
    _aten.index_put_.default,
    _aten.index_put.default,
}
_MAY_MIX = {_aten.copy_.default, _aten._copy_from.default, *_INDEXING}
"""Operations that take tensors of two devices."""
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
            _refuse_in_graph(func)
            _read("tolist")
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
    if _state.is_broken:
        raise CudaError("operation failed due to a previous error during capture")
    target = kwargs.get("device")
    kwargs = kwargs | {name: value for name, value in ON_HOST.items() if name in kwargs}
    flat, tree = tree_flatten((args, kwargs))
    _check_devices(func, flat)
    stays = target is None or torch.device(target).type == "cuda"
    recording = _state.recording
    must_wait = not stays or _must_wait(func, args, flat)
    if must_wait:
        _refuse_in_graph(func)
    if recording is not None:
        recording.check_inputs(func, flat)
        recording.keep(func, flat)
    elif not func.is_view:
        current_stream().launch(str(func))
    if not must_wait and recording is None:
        current_stream().copies.update(_Copy(one) for one in flat if _is_of_host(one))
    owners = {id(one.inner): one for one in flat if isinstance(one, Pretended)}
    inner_args, inner_kwargs = tree_unflatten([one.inner if isinstance(one, Pretended) else one for one in flat], tree)
    found = func(*inner_args, **inner_kwargs)
    if recording is not None:
        recording.add(func, inner_args, inner_kwargs, found)
    if must_wait:
        _read(func)
    if not stays:
        return found
    return tree_map_only(torch.Tensor, lambda one: owners[id(one)] if id(one) in owners else Pretended(one), found)


def _must_wait(func, args, flat):
    """Whether the host waits for the device in an operation: for a number, a size, or memory that is not pinned."""
    if func in _WAITS:
        return True
    if func is _aten.copy_.default and not isinstance(args[0], Pretended):
        return True
    if func in _INDEXING and any(one.dtype in (torch.bool, torch.uint8) for one in args[1] if one is not None):
        return True  # it counts the places
    non_blocking = func is _aten.copy_.default and True in flat[2:]
    return any(_is_of_host(one) and not (non_blocking and one.is_pinned()) for one in flat)


def _is_of_host(one):
    return isinstance(one, torch.Tensor) and not isinstance(one, Pretended) and one.dim() > 0


def _check_devices(func, flat):
    if func in _MAY_MIX or func is _aten._to_copy.default:
        return
    for one in flat:
        if _is_of_host(one):
            raise CudaError(f"{func}: expected all tensors on one device, found {DEVICE} and cpu {tuple(one.shape)}")


def _refuse_in_graph(func):
    if _state.recording is not None:
        raise CudaError(f"{func}: the host waits for the device while a graph is captured")


def _read(func):
    """Wait as an operation does of itself, which the host can ask to be told."""
    if _state.sync_debug_mode == "error":
        raise CudaError("called a synchronizing CUDA operation")
    if _state.sync_debug_mode == "warn":
        warnings.warn(f"called a synchronizing CUDA operation: {func}", stacklevel=4)
    _wait(func, current_stream().record_event())


def _wait(func, *events):
    """Have the host wait until the device has passed events."""
    _refuse_in_graph(func)
    waits[str(func)] += 1
    time.sleep(max(0.0, *(event.done_at - time.perf_counter() for event in events)))
    for event in events:
        event.finish()


class _Copy:
    """A copy from pinned memory that the host has not seen the end of."""

    def __init__(self, source):
        self._source, self._before = source, source.clone()

    def compare(self):
        """Refuse other bytes than those at the time when the copy was queued; once, as its end is seen."""
        if self._before is None:
            return
        now, before = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (self._source, self._before))
        if not torch.equal(now, before):
            raise CudaError("pinned memory was written while a copy from it was queued")
        self._before = None


class _State:
    """Of the device."""

    def __init__(self):
        self.recording = None
        self.is_broken = False
        """Whether a failed capture has left the device unusable for this process, as CUDA may."""
        self.streams = []
        self.current = {}
        """Stream by thread."""
        self.sync_debug_mode = None
        self.kernels = None
        """(name, start, end), in microseconds; None while nobody profiles."""


_state = _State()


class Stream:
    """A queue of work, in order."""

    def __init__(self, device=None, priority=0):
        self.device = torch.device(device) if device is not None else DEVICE
        self.device_index = 0
        self.done_at = 0.0
        """Reading of `time.perf_counter` at which all its work is done."""
        self.copies = set()
        """Copies before its end that the host has not seen the end of."""
        _state.streams.append(self)

    def launch(self, name, num_kernels=1):
        """Queue kernels."""
        start = max(self.done_at, time.perf_counter())
        self.done_at = start + num_kernels * KERNEL_SECONDS
        if _state.kernels is not None:
            _state.kernels.append((name, start * 1e6, self.done_at * 1e6))

    def wait_stream(self, stream):
        """Continue after what another stream has now."""
        self.wait_event(stream.record_event())

    def wait_event(self, event):
        """Continue after an event that was recorded."""
        assert event.stream is not None
        self.done_at = max(self.done_at, event.done_at)
        self.copies |= event.copies

    def record_event(self, event=None):
        """Mark a place in this stream."""
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self):
        """Wait for all of it."""
        _wait("Stream.synchronize", self.record_event())

    def query(self):
        """Whether all is done."""
        return self.record_event().query()


class Event:
    """A mark in a stream."""

    def __init__(self, enable_timing=False, blocking=False, interprocess=False):
        self.stream = None
        self.done_at = 0.0
        self.copies = set()

    def record(self, stream=None):
        """Put it there."""
        self.stream = stream or current_stream()
        self.done_at = max(self.stream.done_at, time.perf_counter())
        self.copies = set(self.stream.copies)

    def synchronize(self):
        """Wait for it, as no graph may."""
        assert self.stream is not None
        _wait("Event.synchronize", self)

    def wait(self, stream=None):
        """Have a stream wait."""
        (stream or current_stream()).wait_event(self)

    def query(self):
        """Whether the device has passed it."""
        if time.perf_counter() < self.done_at:
            return False
        self.finish()
        return True

    def finish(self):
        """The host has seen that the device has passed it, and so the end of all copies before."""
        for copy in self.copies:
            copy.compare()
        for stream in _state.streams:
            stream.copies -= self.copies
        self.copies = set()

    def elapsed_time(self, other):
        """Milliseconds between two events that the device has passed."""
        if not (self.query() and other.query()):
            raise CudaError("device not ready")
        return (other.done_at - self.done_at) * 1e3


_DEFAULT_STREAM = Stream()


def current_stream(device=None):
    """Of this thread; of the main thread where it has none, as in the threads of backward passes."""
    own = _state.current.get(threading.get_ident())
    return own or _state.current.get(threading.main_thread().ident, _DEFAULT_STREAM)


@contextmanager
def stream(chosen):
    """Work goes there."""
    thread = threading.get_ident()
    before = _state.current.get(thread)
    _state.current[thread] = chosen or current_stream()
    try:
        yield
    finally:
        _state.current[thread] = before or _DEFAULT_STREAM


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
        current_stream().launch("graph", sum(not func.is_view for func, *_ in self._calls))
        for func, args, kwargs, found in self._calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_flatten(found)[0], tree_flatten(again)[0], strict=True):
                is_own = isinstance(old, torch.Tensor) and old.untyped_storage().data_ptr() in self._made
                if is_own and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@contextmanager
def graph(captured, pool=None, stream=None, capture_error_mode="global"):
    """Record what is called on the device inside."""
    assert _state.recording is None
    _state.recording = captured
    try:
        with _on(stream):
            yield
    except BaseException:
        _state.is_broken = "PRETENDED_CAPTURE_BREAKS" in os.environ
        raise
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
        return [
            SimpleNamespace(name=name, device_type=kind, time_range=SimpleNamespace(start=start, end=end))
            for name, start, end in self._kernels
        ]


def _set_sync_debug_mode(mode):
    """As torch/csrc/cuda/Module.cpp, which says this the first time."""
    if _state.sync_debug_mode is None:
        notice = (
            "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing operations"
        )
        warnings.warn(notice, stacklevel=2)
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
    torch.cuda.synchronize = _synchronize
    torch.cuda._sleep = lambda cycles: current_stream().launch("spin_kernel")
    torch.cuda.set_sync_debug_mode = _set_sync_debug_mode
    torch.profiler.profile = Profile
    for kind in (Stream, Event, CUDAGraph, graph, stream, current_stream):
        setattr(torch.cuda, kind.__name__, kind)
    torch.Tensor.record_stream = _record_stream
    for name in ("tensor", "as_tensor"):
        setattr(torch, name, _through_host(getattr(torch, name)))


def _synchronize(device=None):
    _wait("torch.cuda.synchronize", *(stream.record_event() for stream in _state.streams))


def _record_stream(tensor, stream):
    assert isinstance(tensor, Pretended)
    assert isinstance(stream, Stream)


def _through_host(make):
    """C++ would call a kernel to place the numbers of a list on the device."""

    def made(*args, device=None, **kwargs):
        on_host = make(*args, **kwargs)
        return on_host if device is None else on_host.to(device)

    return made
