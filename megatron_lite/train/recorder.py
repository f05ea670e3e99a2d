"""Watches a step from below autograd: storages that come and go, collectives, FLOPs of matrix products.

A storage counts from the operation that makes it to the moment when nothing refers to it, once for all its views. What
is still there when a forward is over is an activation; weights, gradients and optimizer state are named by the caller;
all else is working memory. Which it was is known only later, so coming and going is written down and added up at the
end.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from megatron_lite.optim.zero1 import Zero1
from megatron_lite.parallel.context import Axis, ParallelContext
from megatron_lite.plan.ranks import AXES, KINDS, Call

Handler = Callable[[Any, Sequence[Any], dict[str, Any], Any], None]

# c10d operator -> what it is called here, and where its inputs, outputs and group are among its arguments
COLLECTIVES = {
    "c10d::allreduce_": ("all_reduce", 0, 0, 1),
    "c10d::_allgather_base_": ("all_gather", 1, 0, 2),
    "c10d::allgather_": ("all_gather", 1, 0, 2),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1, 0, 2),
    "c10d::reduce_scatter_": ("reduce_scatter", 1, 0, 2),
    "c10d::alltoall_base_": ("all_to_all", 1, 0, 2),
    "c10d::alltoall_": ("all_to_all", 1, 0, 2),
    "c10d::broadcast_": ("broadcast", 0, 0, 1),
    "c10d::reduce_": ("reduce", 0, 0, 1),
    "c10d::barrier": ("barrier", 0, 0, 1),
    "c10d::send": ("send", 0, 0, 1),
    "c10d::recv_": ("receive", 0, 0, 1),
}


class Recorder:
    """What is seen so far. `phase` says in which part of the step: forward, backward, last backward or step."""

    def __init__(self, ctx: ParallelContext):
        self.phase = "step"
        self.calls: list[Call] = []
        self.flops: Counter[str] = Counter()  # by phase
        self._axes: dict[str, Axis] = {}  # group name -> the first axis it serves
        for name in AXES:
            axis: Axis = getattr(ctx, name)
            if axis.group is not None:
                self._axes.setdefault(axis.group.group_name, axis)
        self._sizes: list[int] = []  # of every storage in the order of their coming
        self._kinds: list[str] = []
        self._log: list[int] = []  # number of a storage that comes, ~number of one that goes
        self._live: dict[int, tuple[int, Any]] = {}  # address -> number, reference that tells when it goes
        self._handlers: dict[Any, Handler] = {}

    # ---- what the dispatcher sees

    def see(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        """One operation that has been done."""
        handler = self._handlers.get(func)
        if handler is None:
            handler = self._handlers[func] = self._choose(func)
        handler(func, args, kwargs, out)

    def _choose(self, func: Any) -> Handler:
        if func._schema.name in COLLECTIVES:
            return self._collective
        assert func.namespace != "c10d", f"{func} is a collective that the recorder does not know"
        if _flops_of(func) is not None:
            return self._product
        if func.namespace == "prim" or all(made.alias_info is not None for made in func._schema.returns):
            return _ignore  # asks for a property, makes a view, or writes in place
        return self._makes

    def _makes(self, _: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        for tensor in (out,) if isinstance(out, Tensor) else out if isinstance(out, (tuple, list)) else ():
            if isinstance(tensor, Tensor):
                self.hold(tensor)

    def _product(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        self.flops[self.phase] += _flops_of(func)(*args, **kwargs, out_val=out)
        self._makes(func, args, kwargs, out)

    def _collective(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        kind, gives, makes, group = COLLECTIVES[func._schema.name]
        axis = self._axes[dist.ProcessGroup.unbox(args[group]).group_name]
        given, made = list(_tensors(args[gives])), list(_tensors(args[makes]))
        shapes = [
            tuple(x.shape) if len(each) == 1 else (len(each), *x.shape) for each in (given, made) for x in each[:1]
        ]
        size = max(sum(x.numel() * x.element_size() for x in each) for each in (given, made))
        peer = args[2] if kind in ("send", "receive") else None
        dtype = str(given[0].dtype).removeprefix("torch.")
        self.calls.append(Call(kind, axis.name, dtype, shapes[0], shapes[1], size, peer, self.phase))

    def hold(self, tensor: Tensor, kind: str = "working") -> int:
        """Count a tensor's storage if it is new. Returns its number."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        known = self._live.get(address)
        if known is not None:
            return known[0]
        number = len(self._sizes)
        self._sizes.append(storage.nbytes())
        self._kinds.append(kind)
        self._log.append(number)
        self._live[address] = (number, weakref.ref(storage, partial(self._gone, address, number)))
        return number

    def _gone(self, address: int, number: int, _: object) -> None:
        del self._live[address]
        self._log.append(~number)

    # ---- what the caller says

    def name(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Say what the storages of these tensors are for."""
        for tensor in tensors:
            self._kinds[self.hold(tensor)] = kind

    def watch(self, model: nn.Module, optimizer: Zero1) -> None:
        """Tell weights, gradients and optimizer state apart, and forwards from what is between them."""
        self.name("optimizer", (x for s in optimizer.states for x in (s.exp_avg, s.exp_avg_sq, s.master)))
        self.name("gradients", (state.grad for state in optimizer.states))
        self.name("weights", (bucket.base for bucket in optimizer.weights.buckets))  # fp32 ones are the master too
        model.register_forward_pre_hook(self._begin_forward, with_kwargs=True)
        model.register_forward_hook(self._end_forward)

    def _begin_forward(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self.phase, self._before = "forward", len(self._sizes)
        if kwargs.get("x") is not None:  # came from another rank
            self.name("activations", [kwargs["x"]])

    def _end_forward(self, _: nn.Module, args: Any, out: Tensor) -> None:
        self.phase = "step"
        leaves = self.hold(out)
        for number, _reference in self._live.values():
            if number >= self._before and number != leaves:
                self._kinds[number] = "activations"

    # ---- what it comes to

    def peak(self) -> dict[str, int]:
        """Bytes by kind at the moment when most are in use."""
        now = most = 0
        at = 0
        for i, entry in enumerate(self._log):
            now += self._sizes[entry] if entry >= 0 else -self._sizes[~entry]
            if now > most:
                most, at = now, i
        found = dict.fromkeys(KINDS, 0)
        for entry in self._log[: at + 1]:
            number = entry if entry >= 0 else ~entry
            found[self._kinds[number]] += self._sizes[number] if entry >= 0 else -self._sizes[number]
        return found


class Watch(TorchDispatchMode):
    """Shows a recorder every operation."""

    def __init__(self, recorder: Recorder):
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.recorder.see(func, args, kwargs or {}, out)
        return out


def _flops_of(func: Any) -> Any:
    """The formula of a matrix product, done in place or not; None for all else."""
    namespace, _, name = func._schema.name.partition("::")
    packet = getattr(torch.ops.aten, name.removesuffix("_")) if namespace == "aten" and name.endswith("mm_") else None
    return flop_registry.get(packet or func._overloadpacket)


def _ignore(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
    """It makes no storage."""


def _tensors(x: Any) -> Iterable[Tensor]:
    """The tensors of an argument of a collective, lists of lists included."""
    if isinstance(x, Tensor):
        yield x
    else:
        for each in x:
            yield from _tensors(each)
