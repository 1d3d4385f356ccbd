"""Finds GPU faults on a machine that has no GPU: a device that is not the CPU, and a count of host syncs.

    x = torch.zeros(3, device=devices.DEVICE)     # real numbers; mixed with a tensor of the CPU, it raises as CUDA does
    with devices.count_syncs() as syncs:          # a Counter of (operation, line of the script that made the host wait)
        loss.backward()

The device is torch's PrivateUse1 under the name "pretend". A tensor of it is a shell around one of the CPU: the shell
says where it is, the CPU computes. It shares the CPU's random numbers, so that a run on it equals a run on the CPU.
"""

import contextlib
import functools
import os
import sys
import threading
from collections import Counter
from pathlib import Path

import torch
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

ROOT = Path(__file__).parent.parent
INSTALLED = f"{os.sep}site-packages{os.sep}"
aten = torch.ops.aten


class Backend(backend_registration._DummyBackendModule):
    """What torch asks a device's module for. Not "available": nothing may choose this device by itself."""

    def is_available(self) -> bool:
        return False

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


backend_registration._setup_privateuseone_for_python_backend("pretend", backend_module=Backend())
DEVICE = torch.device("pretend", 0)


class Pretend(torch.Tensor):
    """A tensor of the device: a shell without memory, and the CPU's tensor that does the work."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor):
        layout = {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        shell = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=DEVICE, **layout)
        shell.inner = inner
        shell.number = False
        return shell

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return compute(func, args, kwargs or {})

    def __repr__(self, **options) -> str:
        return f"Pretend({self.inner})"

    def __reduce_ex__(self, protocol):
        """Files hold it as a tensor of the CPU, which is what the scripts load it as (map_location)."""
        return self.inner.__reduce_ex__(protocol)

    def __deepcopy__(self, memo):
        if id(self) in memo:
            return memo[id(self)]
        copied = self.detach().clone()
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, self.requires_grad)
        memo[id(self)] = copied.requires_grad_(self.requires_grad)
        return copied

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        torch.Tensor.data.__set__(self, other)
        self.inner = other.inner

    def storage(self):
        """Asked by safetensors which tensors share memory."""
        return self.inner.storage()

    def untyped_storage(self):
        return self.inner.untyped_storage()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def tolist(self):
        return self.cpu().tolist()

    def numpy(self, **options):
        raise TypeError(f"can't convert {DEVICE} device type tensor to numpy. Use Tensor.cpu() first.")

    def __array__(self, dtype=None):
        return self.numpy()


class Generator(torch.Generator):
    """In place of torch.Generator (see `patched`): one of the device draws the CPU's numbers, but is not the CPU's."""

    known: set[int] = set()

    def __new__(cls, device="cpu"):
        on_device = torch.device(device).type == DEVICE.type
        generator = super().__new__(cls, "cpu" if on_device else device)
        generator.on_device = on_device
        if on_device:
            cls.known.add(generator._cdata)
        else:
            cls.known.discard(generator._cdata)  # a number that was in use before
        return generator

    @property
    def device(self) -> torch.device:
        return DEVICE if self.on_device else super().device


@contextlib.contextmanager
def patched():
    """While this holds, torch.Generator can be one of the device."""
    original = torch.Generator
    torch.Generator = Generator
    try:
        yield
    finally:
        torch.Generator = original


# ---- The rules of devices, as CUDA has them

COPIES = {aten._to_copy.default, aten.copy_.default, aten._copy_from.default}
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
# Besides the pointwise ones: what takes a number that is a tensor of the CPU without dimensions.
TAKES_NUMBERS = {aten.masked_fill.Tensor, aten.masked_fill_.Tensor, aten.fill.Tensor, aten.fill_.Tensor}
TAKES_NUMBERS |= {aten._foreach_mul.Tensor, aten._foreach_mul_.Tensor, aten._foreach_div_.Tensor}


@functools.cache
def rules(func) -> tuple[bool, list[int], list[str]]:
    """Whether a number may be the CPU's, and which arguments are written to, by place and by name."""
    number_is_fine = torch.Tag.pointwise in func.tags or func in TAKES_NUMBERS or func in INDEXING
    written = [(i, argument.name) for i, argument in enumerate(func._schema.arguments) if argument.is_write]
    return number_is_fine, [i for i, _ in written], [name for _, name in written]


def leaves(values) -> list:
    """What is in them, lists of tensors unfolded: much quicker than torch's own."""
    found = []
    for x in values:
        if isinstance(x, (list, tuple)):
            found += x
        else:
            found.append(x)
    return found


def check_devices(func, args, kwargs) -> None:
    """Raise where CUDA would: tensors of two devices in one operation, or a generator of the wrong one."""
    generator = kwargs.get("generator")
    if generator is not None and generator._cdata not in Generator.known:
        raise RuntimeError(f"Expected a '{DEVICE.type}' device type for generator but found 'cpu'")
    if func in COPIES:
        return
    checked = [args[0], *args[2:]] if func in INDEXING else args  # a tensor may be indexed with one of the CPU
    strangers = [x for x in leaves([*checked, *kwargs.values()]) if isinstance(x, torch.Tensor)]
    strangers = [x for x in strangers if not isinstance(x, Pretend)]
    if not strangers:
        return
    number_is_fine, places, names = rules(func)
    written = leaves([args[i] for i in places if i < len(args)] + [kwargs[k] for k in names if k in kwargs])
    for x in strangers:
        if x.dim() > 0 or not number_is_fine or any(x is y for y in written):
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {DEVICE} and cpu! "
                f"({func}, with one of the CPU of shape {tuple(x.shape)})"
            )


def unwrap(x):
    if isinstance(x, Pretend):
        return x.inner
    if isinstance(x, (list, tuple)):
        return [unwrap(y) for y in x]
    return x


def lstm_cell(inputs, hidden, cell, bias=None, other_bias=None):
    """torch has the cells of an LSTM in one operation everywhere but on a CPU -> output, cell, and the four gates."""
    gates = inputs + hidden
    if bias is not None:
        gates = gates + bias + other_bias
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    after = f * cell + i * g
    return o * after.tanh(), after, torch.cat([i, f, g, o], 1)


def lstm_cell_backward(grad_out, grad_after, cell, after, gates, has_bias):
    i, f, g, o = gates.chunk(4, 1)
    grad_out = torch.zeros_like(after) if grad_out is None else grad_out
    grad_after = torch.zeros_like(after) if grad_after is None else grad_after
    total = grad_after + grad_out * o * (1 - after.tanh().square())
    parts = [total * g * i * (1 - i), total * cell * f * (1 - f), total * i * (1 - g.square())]
    grad = torch.cat([*parts, grad_out * after.tanh() * o * (1 - o)], 1)
    return grad, total * f, grad.sum(0) if has_bias else None


IN_PLACE_OF = {
    aten._thnn_fused_lstm_cell.default: lstm_cell,
    aten._thnn_fused_lstm_cell_backward_impl.default: lstm_cell_backward,
}


def compute(func, args, kwargs):
    """Any operation with a tensor of the device, or one that makes such a tensor."""
    note(func, args, kwargs)
    check_devices(func, args, kwargs)
    if func is aten._fused_sdp_choice.default:
        return 0  # the plain attention: the quick one of the CPU has another name than that of other devices
    shells = {id(x.inner): x for x in leaves([*args, *kwargs.values()]) if isinstance(x, Pretend)}
    inner = {k: unwrap(x) for k, x in kwargs.items()}
    target = kwargs.get("device")
    if target is not None:
        inner["device"] = "cpu"
    out = IN_PLACE_OF.get(func, func)(*[unwrap(x) for x in args], **inner)
    if target is not None and torch.device(target).type == "cpu":
        return out
    if isinstance(out, torch.Tensor):
        return wrap(out, shells)
    return tree_map(lambda x: wrap(x, shells) if isinstance(x, torch.Tensor) else x, out)


def wrap(inner: torch.Tensor, shells: dict[int, Pretend]) -> Pretend:
    """What was changed in place keeps its shell."""
    shell = shells.get(id(inner))
    if shell is None:
        return Pretend(inner)
    if shell.shape != inner.shape:
        raise NotImplementedError("the shape of a tensor of the device cannot be changed in place")
    return shell


def copy_from(source, target, non_blocking=False):
    note(aten.copy_.default, (target, source, non_blocking), {})
    inner = [x.inner if isinstance(x, Pretend) else x for x in (target, source)]
    inner[0].copy_(inner[1])
    return target


def scalar_tensor(number, *, dtype=None, layout=None, device=None, pin_memory=None):
    made = Pretend(torch.scalar_tensor(number, dtype=dtype))
    made.number = True
    return made


def reach(func):
    return lambda *args, **kwargs: compute(func, args, kwargs)


# What torch calls below the shells: where tensors are made from nothing, and inside torch.tensor.
library = torch.library.Library("aten", "IMPL")
makers = [aten.empty.memory_format, aten.empty_strided.default, aten.linspace.default]
makers += [aten.arange.default, aten.arange.start, aten.arange.start_step, aten.eye.default, aten.eye.m]
for func in (*makers, aten._local_scalar_dense.default):
    library.impl(func, reach(func), "PrivateUse1")
library.impl("_copy_from", copy_from, "PrivateUse1")
library.impl("scalar_tensor", scalar_tensor, "PrivateUse1")


# ---- Host syncs

WAITS = {
    aten._local_scalar_dense: "item",  # .item(), bool(), float(), int()
    aten.equal: "equal",
    aten.nonzero: "nonzero",
    aten.masked_select: "masked_select",
    aten._unique2: "unique",
    aten.unique_dim: "unique",
    aten.unique_consecutive: "unique",
    aten.bincount: "bincount",
    aten.repeat_interleave: "repeat_interleave",
}
counters: list[Counter] = []
lock = threading.Lock()


def what_waits(func, args, kwargs) -> str | None:
    """The kind of host sync that an operation is on a GPU, if it is one."""
    packet = func.overloadpacket
    on_device = [isinstance(x, Pretend) for x in args if isinstance(x, torch.Tensor)]
    if packet is aten.repeat_interleave and kwargs.get("output_size") is not None:
        return None
    if packet in WAITS:
        return WAITS[packet]
    if func in INDEXING:
        return what_indexing_waits(args)
    if func is aten._to_copy.default and any(on_device) and torch.device(kwargs.get("device") or DEVICE).type == "cpu":
        return "copy to the host"
    if func is aten.copy_.default and any(on_device) and not all(on_device):
        no_wait = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        if not on_device[0]:
            return "copy to the host"
        return None if no_wait else "copy to the device"
    return None


def what_indexing_waits(args) -> str | None:
    indices = [x for x in args[1] if x is not None]
    if isinstance(args[0], Pretend) and not all(isinstance(x, Pretend) for x in indices):
        return "copy to the device"
    if not any(x.dtype in (torch.bool, torch.uint8) for x in indices):
        return None
    if len(args) > 2 and len(indices) == 1:
        # x[mask] = 1.0 is filled in without a look at the mask: a number stays with the CPU. Its gradient is too, but
        # that cannot be told from here, and counts.
        value = args[2]
        if value.numel() == 1 and (value.number if isinstance(value, Pretend) else value.dim() == 0):
            return None
    return "nonzero"


def note(func, args, kwargs) -> None:
    if counters and (kind := what_waits(func, args, kwargs)):
        where = line()
        with lock:
            for counter in counters:
                counter[kind, where] += 1


def line() -> str:
    """The line of the repository that is being run, its function, and the library that it called, if it did."""
    frame, called = sys._getframe(1), ""
    while frame is not None:
        file = frame.f_code.co_filename
        if INSTALLED in file:
            package = file.split(INSTALLED)[1].split(os.sep)[0]
            if package not in ("torch", "tensordict", "accelerate"):
                called = f" by {package}"
        elif file.startswith(str(ROOT) + os.sep) and file != __file__:
            return f"{Path(file).relative_to(ROOT)}:{frame.f_lineno} in {frame.f_code.co_name}{called}"
        frame = frame.f_back
    return f"backward{called}"  # torch runs it in a thread of its own


class Watch(TorchDispatchMode):
    """Counts on tensors of the CPU, where nothing waits: what would on a GPU, copies excepted."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not any(isinstance(x, Pretend) for x in leaves([*args, *kwargs.values()])):
            note(func, args, kwargs)
        return func(*args, **kwargs)


@contextlib.contextmanager
def count_syncs(on_cpu: bool = False):
    """A Counter of (kind, line): of the device's tensors in any thread; with `on_cpu` of the CPU's too, in this one."""
    counter = Counter()
    counters.append(counter)
    try:
        with Watch() if on_cpu else contextlib.nullcontext():
            yield counter
    finally:
        counters[:] = [c for c in counters if c is not counter]
