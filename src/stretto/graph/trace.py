"""A model's forward as a graph of operations (torch.export), for one set of shapes and one mode."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from dataclasses import dataclass
from enum import Enum
from io import StringIO
from pathlib import Path
from typing import Any, Final

import numpy
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.graph_signature import InputKind, OutputKind
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_map_only

from stretto.data import mapped, tensors_in
from stretto.errors import Refused, one_line
from stretto.graph.autocast import settle_types
from stretto.graph.effects import schema_name, written_in

AUTOCAST: Final = "autocast"


@dataclass(frozen=True)
class Traced:
    """A graph whose placeholders are the model's tensors, then what it was called with.

    Args:
        graph: the operations, not yet decomposed; its output is a flat list.
        parameters: placeholder -> name of the parameter in the model, tied ones under their first name.
        buffers: likewise.
        constants: placeholder -> a tensor that is neither.
        arguments: placeholders of what forward was called with, flat, in order.
        mutated: buffers that forward changes, in the order in which the graph gives their new values, ahead of it.
        output: the output, as a tree, with stand-ins for its tensors: the model's, or the loss's terms.
        loss: the operations of the loss, where it was traced with the model: then the arguments are those of forward
            and the batch.
    """

    graph: fx.GraphModule
    parameters: Mapping[str, str]
    buffers: Mapping[str, str]
    constants: Mapping[str, torch.Tensor]
    arguments: tuple[str, ...]
    mutated: tuple[str, ...]
    output: Any
    loss: frozenset[fx.Node] | None = None

    @property
    def autocast(self) -> bool:
        """Whether the types are those that autocast chose, and chooses again where the graph runs under it."""
        return bool(self.graph.meta.get(AUTOCAST))

    @property
    def scored(self) -> bool:
        """Whether the loss is in it."""
        return self.loss is not None

    def bound(self, held: Mapping[str, torch.Tensor], given_with: Any) -> list[Any]:
        """What its placeholders stand for in a call, in order.

        Args:
            held: parameters and buffers, by name.
            given_with: arguments and keywords, and with the loss the batch.
        """
        named = {**self.parameters, **self.buffers}
        given = dict(zip(self.arguments, tensors_in(given_with), strict=True))
        names = [node.name for node in self.graph.graph.nodes if node.op == "placeholder"]
        return [held[named[n]] if n in named else given.get(n, self.constants.get(n)) for n in names]


@dataclass(frozen=True)
class Scoring:
    """What a training step does with the model's output: ``terms(output, batch)``, a tree of tensors."""

    terms: Callable[[Any, Any], Any]
    batch: Any


Surround = Callable[[], AbstractContextManager[Any]]


def trace(
    module: nn.Module,
    arguments: tuple[Any, ...],
    keywords: Mapping[str, Any],
    scoring: Scoring | None = None,
    surround: Surround = nullcontext,
) -> Traced:
    """Traces ``module(*arguments, **keywords)`` in the mode (train or eval) that it is in.

    Args:
        scoring: what goes on from the output, where that is to be in the graph.
        surround: what surrounds both; tensors that they are called with keep their types.

    Raises:
        Refused: what forward does depends on the data, or can't be traced.
    """
    mapped((arguments, dict(keywords)), _same, _check_given)
    outputs: list[Any] = []
    autocast = isinstance(surround(), torch.autocast)
    # Entered inside, it would be an operation of its own with all others in it.
    within, ambient = (nullcontext, surround) if autocast else (surround, nullcontext)
    call = _Listed(module, (arguments, dict(keywords)), outputs.append, scoring, within)
    call.train(module.training)
    fails = "the model can't be traced, so it can't be cut inside" if scoring is None else "the loss can't be traced"
    drawn = random.getstate(), numpy.random.get_state()[1].tobytes()  # type: ignore[index]
    try:
        with ambient():
            program = _export(call)
    except Refused:
        raise
    except Exception as error:  # whatever the model does may fail in its own way
        raise Refused(f"{fails}: {_why(error)}") from error
    if vague := next((node.name for node in program.graph.nodes if _is_vague(node.meta.get("val"))), None):
        raise Refused(
            f"{fails}: the shape of what {vague} gives depends on the numbers that it is given; use torch.where in "
            "place of a mask as an index"
        )
    if drawn != (random.getstate(), numpy.random.get_state()[1].tobytes()):  # type: ignore[index]
        raise Refused(
            "the model's forward draws random numbers from Python or NumPy, and a trace draws them only once; "
            "draw them from torch"
        )
    FakeTensorMode.cache_clear()  # torch keeps what each operation gives for each shape, for the process's whole life
    _without_assertions(program.graph_module)
    if autocast:
        program.graph_module.meta[AUTOCAST] = True
        with surround():
            settle_types(program.graph_module)
    return _read(program, module, outputs[-1], scoring is not None)


def _read(program: torch.export.ExportedProgram, module: nn.Module, output: Any, scored: bool) -> Traced:
    """By the names that the tensors have in the model. Raises Refused where forward changes what it must not."""
    changed = {one.name for one in written_in(program.graph.nodes)}
    first = {id(tensor): name for name, tensor in reversed(_named(module))}
    every = {f"model.{name}": tensor for name, tensor in _named(module)}
    kinds: dict[InputKind, dict[str, str]] = {kind: {} for kind in InputKind}
    flat: list[str] = []
    for spec in program.graph_signature.input_specs:
        name = spec.arg.name
        if name in changed and spec.kind in (InputKind.USER_INPUT, InputKind.PARAMETER):
            what = "its input" if spec.target is None else f"the parameter {spec.target.removeprefix('model.')}"
            raise Refused(f"the model's forward changes {what} in place, which can't be cut inside")
        if spec.kind is InputKind.USER_INPUT:
            flat.append(name)
        elif spec.target is not None:
            kinds[spec.kind][name] = spec.target
    mutated = []
    for out in program.graph_signature.output_specs:
        if out.kind is OutputKind.BUFFER_MUTATION and out.target is not None:
            mutated.append(out.target.removeprefix("model."))
        elif out.kind is not OutputKind.USER_OUTPUT:
            raise Refused(
                f"the model's forward changes {out.target or 'its input'} in place, which can't be cut inside"
            )
    return Traced(
        graph=program.graph_module,
        parameters={key: first[id(every[target])] for key, target in kinds[InputKind.PARAMETER].items()},
        buffers={key: first[id(every[target])] for key, target in kinds[InputKind.BUFFER].items()},
        constants={key: program.constants[target] for key, target in kinds[InputKind.CONSTANT_TENSOR].items()},
        arguments=tuple(flat),
        mutated=tuple(mutated),
        output=mapped(output, _stand_in),
        loss=_of_loss(program.graph) if scored else None,
    )


def let_go(graph: fx.GraphModule, *kept: str) -> None:
    """Leaves of what its nodes know what ``kept`` names, once it is only run. A trace's fake tensors hold all that made
    them: megabytes, for each set of shapes."""
    for inner in graph.modules():
        for node in inner.graph.nodes if isinstance(inner, fx.GraphModule) else ():
            known = {key: node.meta[key] for key in kept if key in node.meta}
            node.meta = tree_map_only(torch.Tensor, _stand_in, known)


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """Of its shape and type, and nothing else."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _without_assertions(graph: fx.GraphModule) -> None:
    """Of types they would be wrong: in float64 a request for float32 is widened, and what was given in it is not."""
    for node in list(graph.graph.nodes):
        if schema_name(node) == "aten::_assert_tensor_metadata":
            graph.graph.erase_node(node)
    graph.recompile()


def _is_vague(value: Any) -> bool:
    """Whether a value is, or has a shape, that only the numbers tell."""
    if isinstance(value, torch.Tensor):
        return not all(isinstance(size, int) for size in value.shape)
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)


def _of_loss(graph: fx.Graph) -> frozenset[fx.Node]:
    """What comes after the model's last operation."""
    found: list[fx.Node] = []
    for node in graph.nodes:
        if node.op == "call_function":
            within = any(path == "model" for path, _ in node.meta.get("nn_module_stack", {}).values())
            found = [] if within else [*found, node]
    return frozenset(found)


def _export(call: _Listed) -> torch.export.ExportedProgram:
    """Once more where torch has taken a tensor of its own making for a constant: seen once in some hundreds of traces,
    of a model without constants (torch 2.13), for no reason that was found; the same test passed when it ran again.
    """
    given, printed = (list(tensors_in(call.given)),), StringIO()
    with redirect_stdout(printed):  # where it fails, torch prints the whole graph
        try:
            found = torch.export.export(call, given, strict=False)
        except Exception as error:
            if "fake tensor in the exported program constant" not in str(error):
                raise
            found = torch.export.export(call, given, strict=False)
    sys.stdout.write(printed.getvalue())
    return found


def _why(error: Exception) -> str:
    """Of torch's page on a choice by the data: what chooses, and where."""
    text = str(error)
    if "data-dependent" not in text:
        return one_line(error)
    places = re.findall(r'File "([^"]+)", line (\d+), in \w+\n\s*(.+)', text)
    where = f" ({Path(places[-1][0]).name}, line {places[-1][1]}: {places[-1][2].strip()})" if places else ""
    return (
        f"what is done, or a shape in it, depends on the numbers that it is given{where}; use torch.where in "
        "place of a branch"
    )


class _Listed(nn.Module):
    """A call of a model that takes the tensors of its arguments as a list and gives those of its output as one.

    With a loss it takes those of the batch too, and gives those of the loss's terms.
    """

    def __init__(
        self, model: nn.Module, given: Any, note: Callable[[Any], None], scoring: Scoring | None, surround: Surround
    ) -> None:
        super().__init__()
        self.model, self.surround = model, surround
        self.terms = None if scoring is None else scoring.terms
        self.given = given if scoring is None else (*given, scoring.batch)
        self.note = note  # export takes back what a module sets on itself while it is traced

    def forward(self, values: list[torch.Tensor]) -> list[torch.Tensor]:
        """The output's tensors; the tree around them is kept."""
        arguments, keywords, *batch = filled(self.given, values)
        with self.surround():
            output = self.model(*arguments, **keywords)
            if self.terms is not None:
                output = self.terms(output, *batch)
        mapped(output, _same, _check_returned)
        self.note(output)
        return list(tensors_in(output))


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _check_given(node: Any) -> Any:
    """Raises Refused for what may hold tensors that a trace would take for constants."""
    if not isinstance(node, complex | torch.dtype | torch.device | torch.layout | slice | range | Enum):
        raise Refused(
            f"the model is called with a {type(node).__name__}, into which a trace can't look, so it can't be cut "
            "inside; let inputs() give tensors, numbers, or tuples, lists, dicts and dataclasses of them"
        )
    return node


def _check_returned(node: Any) -> Any:
    held = getattr(node, "__dict__", {}).values()
    if isinstance(node, PackedSequence) or any(isinstance(one, torch.Tensor) for one in held):
        raise Refused(
            f"the model returns a {type(node).__name__}, into which a trace can't look, so it can't be cut inside; let "
            "it return tensors, or tuples, lists, dicts and dataclasses of them"
        )
    return node


def filled(tree: Any, values: Iterable[torch.Tensor]) -> Any:
    """The tree with other tensors."""
    left = iter(values)
    return mapped(tree, lambda _: next(left))


def _named(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
