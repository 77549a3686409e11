"""What stands between a model here and the tensors of a run.

A binding says which tensors a model has, loads a version into it and writes what is brought home
into a frame. There is one for `torch.nn.Module` and one for plain numpy arrays; nothing else in
the package knows what a model is.
"""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, Optional, Protocol

import numpy as np

from .errors import Mismatch, Misuse
from .frame import NUMPY, Frame, Place, Spec, widen

if TYPE_CHECKING:
    import torch

Arrays = MutableMapping[str, np.ndarray]
#: What a run can train: a `torch.nn.Module`, or a dict of numpy arrays.
Model = Any
#: Roles by patterns of names: `{"head.*": "trainable:head", "position": "frozen"}`.
Roles = Optional[Mapping[str, str]]


class Binding(Protocol):
    """A model as the rest of the package sees it."""

    engine: str

    def specs(self, roles: Roles) -> list[Spec]: ...

    def initial(self) -> dict[str, np.ndarray]: ...

    def load(self, frame: Frame) -> None: ...

    def begin(self) -> None: ...

    def add(self, given: Any, frame: Frame, weight: float, first: bool) -> None: ...

    def clear(self) -> None: ...

    def reseed(self, seed: int) -> None: ...

    def batch(self, columns: Mapping[str, np.ndarray]) -> Any: ...


def bind(model: Model) -> Binding:
    """The binding for a model."""
    if isinstance(model, MutableMapping):
        return ArrayBinding(model)
    if hasattr(model, "named_parameters") and hasattr(model, "named_buffers"):
        return TorchBinding(model)
    raise Misuse(
        f"a {type(model).__name__} cannot be trained",
        "pass a torch.nn.Module, or a dict of numpy arrays by name",
    )


def check_specs(mine: Sequence[Spec], run: Sequence[Spec], name: str) -> None:
    """Says how a model differs from a run's, if it does."""
    here = {spec.name: spec for spec in mine}
    there = {spec.name: spec for spec in run}
    differences = [f"`{n}` is not in the run" for n in here if n not in there]
    differences += [f"`{n}` is not in the model" for n in there if n not in here]
    for n, spec in here.items():
        other = there.get(n)
        if other is None:
            continue
        if spec.shape != other.shape:
            differences.append(f"`{n}` is {list(spec.shape)} here, {list(other.shape)} in the run")
        elif spec.dtype != other.dtype:
            differences.append(f"`{n}` is {spec.dtype} here, {other.dtype} in the run")
        elif other.kind == "trainable" and spec.kind == "frozen":
            differences.append(f"`{n}` is frozen here, the run trains it")
    if differences:
        shown = "; ".join(differences[:5])
        more = f"; and {len(differences) - 5} more" if len(differences) > 5 else ""
        raise Mismatch(
            f"the model is not the one of run `{name}`: {shown}{more}",
            "build the same model that the run was created with, or create a run of another name",
        )


def _role(name: str, default: str, roles: Roles) -> dict[str, Any]:
    """The role of a tensor, as it travels."""
    text = default
    for pattern, wanted in (roles or {}).items():
        if fnmatch.fnmatchcase(name, pattern):
            text = wanted
            break
    kind, _, rest = text.partition(":")
    if kind == "frozen" and not rest:
        return {"role": "frozen"}
    if kind == "trainable":
        return {"role": "trainable", "group": rest or "default"}
    if kind == "buffer" and rest in ("mean", "max", "last"):
        return {"role": "buffer", "merge": rest}
    if kind == "ema" and rest.count(",") == 1:
        of, tau = rest.split(",")
        return {"role": "ema", "of": of, "tau": float(tau)}
    raise Misuse(
        f"`{text}` is not a role for `{name}`",
        "roles are frozen, trainable, trainable:GROUP, buffer:mean, buffer:max, buffer:last and "
        "ema:TENSOR,TAU",
    )


def _wrong_dtype(name: str, dtype: str) -> Misuse:
    return Misuse(
        f"`{name}` is {dtype}, and what is trained must be float32",
        "keep the parameters in float32 (model.float()) and use autocast for mixed precision",
    )


class ArrayBinding:
    """A dict of numpy arrays. float32 arrays are trained, others stay as they are.

    Gradients are given as a dict of arrays by the same names.
    """

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays
        #: Buffers as the version that was loaded last has them.
        self._buffers: dict[str, np.ndarray] = {}
        self.engine = f"numpy {np.__version__}"

    def specs(self, roles: Roles) -> list[Spec]:
        types = {dtype: name for name, dtype in NUMPY.items() if name != "BF16"}
        specs = []
        for name, array in self.arrays.items():
            dtype = types.get(array.dtype)
            if dtype is None:
                raise Misuse(f"`{name}` is {array.dtype}, which cannot travel")
            role = _role(name, "trainable" if dtype == "F32" else "frozen", roles)
            if role["role"] == "trainable" and dtype != "F32":
                raise _wrong_dtype(name, str(array.dtype))
            specs.append(Spec(name, dtype, tuple(array.shape), role))
        return specs

    def initial(self) -> dict[str, np.ndarray]:
        return {name: np.array(array) for name, array in self.arrays.items()}

    def load(self, frame: Frame) -> None:
        for place in frame.layout.places:
            array = frame.array(place)
            self.arrays[place.spec.name][...] = widen(array) if place.dtype == "BF16" else array
            if place.spec.kind == "buffer":
                self._buffers[place.spec.name] = self.arrays[place.spec.name].copy()

    def begin(self) -> None:
        for name, value in self._buffers.items():
            self.arrays[name][...] = value

    def add(self, given: Any, frame: Frame, weight: float, first: bool) -> None:
        if not isinstance(given, Mapping):
            raise Misuse(
                f"step() got a {type(given).__name__}",
                "give the gradients as a dict of arrays, by the names of the parameters",
            )
        wanted = {place.spec.name for place in frame.layout.places}
        unknown = sorted(set(given) - wanted)
        if unknown:
            raise Misuse(f"`{unknown[0]}` is not a trainable tensor of the run")
        for place in frame.layout.places:
            name = place.spec.name
            value = given.get(name)
            if value is None:
                is_buffer = place.spec.kind == "buffer"
                value = self.arrays[name] if is_buffer else np.zeros(place.spec.shape, np.float32)
            value = np.asarray(value)
            if value.shape != place.spec.shape:
                raise Mismatch(f"the gradient of `{name}` is {value.shape}, not {place.spec.shape}")
            target = frame.array(place)
            if place.spec.kind != "trainable" or (first and weight == 1.0):
                target[...] = value
            elif first:
                np.multiply(value, np.float32(weight), out=target, casting="same_kind")
            else:
                target += np.float32(weight) * value.astype(np.float32, copy=False)

    def clear(self) -> None:
        """There is nothing to forget: gradients are the caller's."""

    def reseed(self, seed: int) -> None:
        """Randomness is the caller's: `run.seed` is there for a generator of their own."""

    def batch(self, columns: Mapping[str, np.ndarray]) -> Any:
        return dict(columns)


class TorchBinding:
    """A `torch.nn.Module`: roles come from `named_parameters` and `named_buffers`.

    Parameters that require a gradient are trained, others are frozen. Persistent buffers are
    brought home: floats are averaged, integers take the maximum (BatchNorm's statistics and
    counter). A buffer of a part of the model whose parameters are all frozen is frozen as well.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        import torch

        self.torch = torch
        self.module = module
        self.engine = f"torch {torch.__version__}"
        self._types = {
            torch.float32: "F32",
            torch.float64: "F64",
            torch.float16: "F16",
            torch.bfloat16: "BF16",
            torch.int64: "I64",
            torch.int32: "I32",
            torch.int16: "I16",
            torch.int8: "I8",
            torch.uint8: "U8",
            torch.bool: "BOOL",
        }
        self._torch_types = {name: dtype for dtype, name in self._types.items()}
        kept = set(module.state_dict())
        self._parameters = dict(module.named_parameters())
        self._buffers = {n: b for n, b in module.named_buffers() if n in kept}
        self._loaded_buffers: dict[str, torch.Tensor] = {}
        with warnings.catch_warnings():
            # torch says once that it cannot protect bytes from being written to; what comes from
            # the hive is only read.
            warnings.simplefilter("ignore")
            torch.frombuffer(bytes(4), dtype=torch.float32)
        #: Views into the frame that is filled over and over, made once.
        self._views: tuple[Frame, list[tuple[Place, torch.Tensor]]] | None = None

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {**self._parameters, **self._buffers}

    def _is_frozen_part(self, buffer: str) -> bool:
        """Whether the closest module around a buffer that has parameters has only frozen ones."""
        path = buffer.split(".")[:-1]
        while True:
            module = self.module.get_submodule(".".join(path))
            parameters = list(module.parameters())
            if parameters:
                return not any(parameter.requires_grad for parameter in parameters)
            if not path:
                return False
            path.pop()

    def specs(self, roles: Roles) -> list[Spec]:
        specs = []
        for name, tensor in self._tensors().items():
            dtype = self._types.get(tensor.dtype)
            if dtype is None:
                raise Misuse(f"`{name}` is {tensor.dtype}, which cannot travel")
            if name in self._parameters:
                default = "trainable" if tensor.requires_grad else "frozen"
            elif self._is_frozen_part(name):
                default = "frozen"
            else:
                default = {"F32": "buffer:mean", "I64": "buffer:max"}.get(dtype, "buffer:last")
            role = _role(name, default, roles)
            if role["role"] == "trainable" and dtype != "F32":
                raise _wrong_dtype(name, str(tensor.dtype))
            specs.append(Spec(name, dtype, tuple(tensor.shape), role))
        return specs

    def initial(self) -> dict[str, np.ndarray]:
        values = {}
        for name, tensor in self._tensors().items():
            value = tensor.detach().to("cpu").contiguous()
            if value.dtype == self.torch.bfloat16:
                raise Misuse(f"`{name}` is bfloat16; keep the model in float32 and use autocast")
            values[name] = value.numpy().copy()
        return values

    def _view(self, frame: Frame, place: Place) -> torch.Tensor:
        count = int(np.prod(place.spec.shape, dtype=np.int64))
        if count == 0:
            return self.torch.empty(place.spec.shape, dtype=self._torch_types[place.dtype])
        flat = self.torch.frombuffer(
            frame.buffer,
            dtype=self._torch_types[place.dtype],
            count=count,
            offset=frame.offset(place),
        )
        return flat.reshape(place.spec.shape)

    def load(self, frame: Frame) -> None:
        tensors = self._tensors()
        with self.torch.no_grad():
            for place in frame.layout.places:
                name = place.spec.name
                tensors[name].copy_(self._view(frame, place))
                if name in self._buffers:
                    self._loaded_buffers[name] = self._buffers[name].clone()

    def begin(self) -> None:
        """Sets buffers back to what the version has.

        A module in training mode changes them with every batch. What a contribution brings home
        must follow from the version and its own samples alone, not from what this worker did
        before; and frozen ones must not drift.
        """
        with self.torch.no_grad():
            for name, value in self._loaded_buffers.items():
                self._buffers[name].copy_(value)

    def add(self, given: Any, frame: Frame, weight: float, first: bool) -> None:
        """Adds the gradients, times `weight`, and clears them."""
        if given is not self.module:
            raise Misuse(
                "step() got another model than the run was joined with",
                "pass the same module to join() or create() and to step()",
            )
        torch = self.torch
        if all(parameter.grad is None for parameter in self._parameters.values()):
            raise Misuse(
                "no parameter has a gradient", "call loss.backward() before run.step(model, loss)"
            )
        if self._views is None or self._views[0] is not frame:
            self._views = (frame, [(p, self._view(frame, p)) for p in frame.layout.places])
        with torch.no_grad():
            for place, view in self._views[1]:
                name = place.spec.name
                if place.spec.kind == "trainable":
                    gradient = self._parameters[name].grad
                    if gradient is None:
                        if first:
                            view.zero_()
                        continue
                    gradient = gradient.detach()
                    if gradient.is_sparse:
                        gradient = gradient.to_dense()
                    if first:
                        view.copy_(gradient)
                        if weight != 1.0:
                            view.mul_(weight)
                    else:
                        view.add_(gradient.to(view.device, view.dtype), alpha=weight)
                else:
                    # Of several batches the last value: running statistics are averages already.
                    # A parameter may have been given the role of a buffer.
                    view.copy_(
                        self._buffers[name] if name in self._buffers else self._parameters[name]
                    )
        self.clear()

    def clear(self) -> None:
        """Forgets gradients."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def reseed(self, seed: int) -> None:
        # What `torch.manual_seed` does, which takes a millisecond in current versions. Seeds have
        # 63 bits and a sign.
        seed &= 2**63 - 1
        self.torch.default_generator.manual_seed(seed)
        if self.torch.cuda.is_initialized():
            self.torch.cuda.manual_seed_all(seed)

    def batch(self, columns: Mapping[str, np.ndarray]) -> Any:
        return {name: self.torch.from_numpy(column) for name, column in columns.items()}


def default_collate() -> Any:
    """torch's way of making a batch of samples, where torch is there."""
    try:
        from torch.utils.data import default_collate as collate
    except ImportError:
        return _collate_arrays
    return collate


def _collate_arrays(items: Sequence[Any]) -> Any:
    """Stacks samples: tuples and dicts field by field, numbers and arrays into an array."""
    first = items[0]
    if isinstance(first, Mapping):
        return {key: _collate_arrays([item[key] for item in items]) for key in first}
    if isinstance(first, (tuple, list)):
        return tuple(_collate_arrays(list(field)) for field in zip(*items))
    return np.stack([np.asarray(item) for item in items])
