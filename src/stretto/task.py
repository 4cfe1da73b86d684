"""Task: what is learnt. A plain Python file with plain functions, loaded, checked and given its settings."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import yaml

from stretto.errors import RecipeError, TaskError, nearest, one_line
from stretto.layout import Layout, check_layout
from stretto.metrics import check_metrics, numbers, ratio, ratios
from stretto.mistakes import in_one_line
from stretto.recipe import Recipe
from stretto.taskfile import import_file

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import Dataset

    from stretto.metrics import Metric, Total

# Function -> how many positional arguments the engine passes; what follows them are settings.
REQUIRED: Final = (("model", 0), ("data", 0), ("loss", 2), ("optimizer", 1), ("recipe", 0))
OPTIONAL: Final = (
    ("inputs", 1),
    ("collate", 1),
    ("schedule", 2),
    ("metrics", 2),
    ("summarize", 1),
    ("baselines", 0),
    ("weights", 1),
    ("layout", 0),
)
# Entries of a mapping that a loss reads and a model must not be handed by default, as models that take them
# (Hugging Face's) would compute a loss of their own.
TARGET_NAMES: Final = frozenset({"label", "labels", "target", "targets", "weight", "weights"})


Pair = tuple["Tensor", "Tensor"]  # a sum and its weight


@dataclass(frozen=True)
class Setting:
    """One value and where it came from (``task default``, ``--set``, ...)."""

    value: Any
    origin: str


class Params(Sequence["nn.Parameter"]):
    """Parameters with their names and logical shapes, as an optimizer factory gets them."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        self._named = tuple(named)

    def named(self) -> tuple[tuple[str, nn.Parameter], ...]:
        """Pairs of name and parameter, in the model's order."""
        return self._named

    def __len__(self) -> int:
        return len(self._named)

    def __getitem__(self, index: Any) -> Any:
        chosen = self._named[index]
        return [parameter for _, parameter in chosen] if isinstance(index, slice) else chosen[1]

    def __iter__(self) -> Iterator[nn.Parameter]:
        return (parameter for _, parameter in self._named)


@dataclass(frozen=True)
class Task:
    """A loaded task whose settings are bound; every method calls the user's function of that name.

    Args:
        name: for people and for the run folder.
        path: the task's file, or None for one that was handed over as an object.
        functions: the user's functions by name.
        settings: every keyword argument of them with its value and origin.
        resolved: the recipe, each field with its origin.
    """

    name: str
    path: Path | None
    functions: Mapping[str, Callable[..., Any]]
    settings: Mapping[str, Setting]
    recipe: Recipe
    recipe_origins: Mapping[str, str] = field(default_factory=dict)

    def _call(self, function: str, *arguments: Any) -> Any:
        call = self.functions[function]
        names = _setting_names(call, dict((*REQUIRED, *OPTIONAL))[function])
        try:
            return call(*arguments, **{name: self.settings[name].value for name in names})
        except Exception as error:
            given = {name: self.settings[name].value for name in names if self.settings[name].origin == "--set"}
            if (line := in_one_line(error, function, arguments, given)) is not None:
                raise TaskError(line) from error
            raise

    def has(self, function: str) -> bool:
        """Whether the task defines ``function``."""
        return function in self.functions

    def model(self) -> nn.Module:
        """The model, really built. Seeding is the caller's. Raises TaskError where it is no ``nn.Module``."""
        from torch import nn

        module = self._call("model")
        if not isinstance(module, nn.Module):
            raise TaskError(f"task: model() must return a torch.nn.Module, got {type(module).__name__}")
        return module

    def data(self) -> dict[str, Dataset[Any]]:
        """The datasets by split, ``train`` among them. Raises TaskError for what is no map-style dataset."""
        found = self._call("data")
        if found is None:
            raise TaskError("task: data() returned None; it must return a dataset, or {'train': ..., 'val': ...}")
        splits = dict(found) if isinstance(found, Mapping) else {"train": found}
        if "train" not in splits:
            raise TaskError(f"task: data() returned the splits {sorted(splits)}; one must be named 'train'")
        for name, dataset in splits.items():
            if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
                raise TaskError(
                    f"task: data()[{name!r}] is a {type(dataset).__name__}; expected a map-style dataset with "
                    "__getitem__ and __len__ (iterable datasets can't be cut by sample ids)"
                )
        return splits

    def losses(self, output: Any, batch: Any) -> dict[str, Pair]:
        """The terms of the loss by name: sum of the losses and sum of their weights, both 0-dimensional.

        A task whose loss is one pair has the one term ``loss``. Several are each divided by their own weight, which has
        to be known before the first backward: :meth:`weights` gives them.
        """
        found = self._call("loss", output, batch)
        if not isinstance(found, Mapping):
            return {"loss": check_pair(found, "loss")}
        if not self.has("weights"):
            raise TaskError(
                f"task: loss() returned {len(found)} terms ({', '.join(map(str, found))}), each with a weight of its "
                "own: write weights(batch) too, a mapping from each term to its weight, to be known before backward"
            )
        if len(found) == 0:
            raise TaskError("task: loss() returned no term")
        return {str(name): check_pair(pair, f"loss()[{name!r}]") for name, pair in found.items()}

    def weights(self, batch: Any) -> dict[str, float] | None:
        """The weight of each term of the loss on ``batch``, or None where the task doesn't say (and has one term)."""
        if not self.has("weights"):
            return None
        found = self._call("weights", batch)
        if not isinstance(found, Mapping) or not found:
            raise TaskError(f"task: weights() must return a mapping from term to weight, got {type(found).__name__}")
        return {str(name): float(weight) for name, weight in found.items()}

    def optimizer(self, params: Params) -> Optimizer:
        """The optimizer over ``params``. Raises TaskError for anything else."""
        from torch.optim import Optimizer

        made = self._call("optimizer", params)
        if not isinstance(made, Optimizer):
            raise TaskError(f"task: optimizer() must return a torch.optim.Optimizer, got {type(made).__name__}")
        if any(each.default is each.empty for each in inspect.signature(made.step).parameters.values()):
            raise TaskError(
                f"task: optimizer() returned {type(made).__name__}, whose step() must be given a closure that runs the "
                "model again; a step here is one batch, so use an optimizer without (SGD, AdamW, ...)"
            )
        return made

    def schedule(self, optimizer: Optimizer) -> LRScheduler | None:
        """The learning-rate schedule, stepped once a committed step, or None."""
        if not self.has("schedule"):
            return None
        made = self._call("schedule", optimizer, self.recipe.steps)
        if type(made).__name__ == "ReduceLROnPlateau":
            raise TaskError(
                "task: schedule() returned ReduceLROnPlateau, which needs an evaluated metric: not built yet"
            )
        return made  # type: ignore[no-any-return]

    def inputs(self, batch: Any, forward: Callable[..., Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments of the model for ``batch``."""
        if self.has("inputs"):
            return _as_arguments(self._call("inputs", batch))
        return default_inputs(batch, forward)

    def collate(self, samples: list[Any]) -> Any:
        """One batch from a list of samples; torch's ``default_collate`` unless the task has its own."""
        if self.has("collate"):
            return self._call("collate", samples)
        from stretto.collate import collate

        return collate(samples)

    def metrics(self, output: Any, batch: Any) -> dict[str, Metric]:
        """By name pairs (sum, weight), or rows [samples, ...] that are kept; empty where the task has none."""
        return check_metrics(self._call("metrics", output, batch)) if self.has("metrics") else {}

    def summarize(self, totals: Mapping[str, Total]) -> dict[str, float]:
        """What to show for the totals of a split, ``loss`` among them: by default each pair's ratio."""
        if not self.has("summarize"):
            return ratios(totals)
        return {"loss": ratio(totals["loss"], "loss"), **numbers(self._call("summarize", dict(totals)))}

    def layout(self) -> Layout:
        """What the task says of how its model may be cut; nothing where it has no ``layout()``."""
        return check_layout(self._call("layout")) if self.has("layout") else Layout()

    def baselines(self) -> dict[str, float]:
        """Numbers to print beside the held-out metrics, such as what a trivial model reaches; may be empty. A run asks
        once, on the CPU in a process of its own."""
        return dict(self._call("baselines")) if self.has("baselines") else {}


def check_pair(value: Any, where: str) -> Pair:
    """``value`` as (sum, weight), both 0-dimensional tensors.

    Raises:
        TaskError: a bare scalar, which can't be averaged exactly over uneven pieces; a vector; not two parts.
    """
    import torch

    if isinstance(value, torch.Tensor):
        raise TaskError(
            f"task: {where} returned one tensor; return the pair (sum of the losses, sum of their weights), as in "
            "`return stretto.losses.cross_entropy(output, y)` or `return losses.sum(), torch.tensor(losses.numel())`: "
            "a mean of means over uneven pieces is not the mean"
        )
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise TaskError(f"task: {where} must return the pair (sum, weight), got {type(value).__name__}")
    total, weight = (part if isinstance(part, torch.Tensor) else torch.tensor(float(part)) for part in value)
    for name, part in (("sum", total), ("weight", weight)):
        if part.ndim:
            raise TaskError(
                f"task: {where}: the {name} must have no dimensions, got shape {tuple(part.shape)}; call .sum()"
            )
    return total, weight


def default_inputs(batch: Any, forward: Callable[..., Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Of a pair (x, y) the x; of a mapping what ``forward`` names, without targets, never by ``**kwargs``; of a
    dataclass likewise, by its fields' names."""
    if dataclasses.is_dataclass(batch) and not isinstance(batch, Mapping):
        batch = {each.name: getattr(batch, each.name) for each in dataclasses.fields(batch)}
    if isinstance(batch, Mapping):
        named = [
            name
            for name, parameter in inspect.signature(forward).parameters.items()
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        ]
        keywords = {name: batch[name] for name in named if name in batch and name not in TARGET_NAMES}
        if not keywords:
            raise TaskError(
                f"task: none of the batch's entries {sorted(map(str, batch))} is an argument of the model's forward "
                f"({', '.join(named)}); write inputs(batch)"
            )
        return (), keywords
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return (batch[0],), {}
    if isinstance(batch, tuple | list):
        raise TaskError(
            f"task: a batch of {len(batch)} parts: write inputs(batch) to say what the model is called with"
        )
    return (batch,), {}


def _as_arguments(value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(value, Mapping):
        return (), dict(value)
    # Only a plain tuple is a list of arguments: a named tuple, such as a PackedSequence, is one of them.
    return (value, {}) if type(value) is tuple else ((value,), {})


def load_task(source: str | Path | ModuleType | Any, sets: Mapping[str, str | Any] | None = None) -> Task:
    """The task in a file, in a folder's ``task.py``, or of a module or object, with ``sets`` applied.

    Args:
        source: a path, or an object whose attributes are the functions.
        sets: values by name, as ``--set key=value`` gives them (text is read as YAML) or as Python objects.

    Raises:
        TaskError: no such file, no such function, a misspelt setting (the nearest is offered), a value of another type.
    """
    path = resolve_task_path(source) if isinstance(source, str | Path) else None
    holder = import_file(path) if path is not None else source
    functions = {}
    for name, _ in (*REQUIRED, *OPTIONAL):
        if callable(found := getattr(holder, name, None)):
            functions[name] = found
    missing = [name for name, _ in REQUIRED if name not in functions]
    where = str(path) if path is not None else getattr(holder, "__name__", type(holder).__name__)
    if missing:
        raise TaskError(f"task {where}: missing the function(s) {', '.join(f'{name}()' for name in missing)}")
    settings, recipe, origins = _bind(functions, dict(sets or {}))
    name = (path.parent.name if path.name == "task.py" else path.stem) if path is not None else where.rpartition(".")[2]
    return Task(name, path, functions, settings, recipe, origins)


def resolve_task_path(source: str | Path) -> Path:
    """The absolute path of a task's file. Raises TaskError naming what is there instead."""
    path = Path(source).expanduser()
    if path.is_dir():
        if not (path / "task.py").is_file():
            raise TaskError(f"task: the folder {path} holds no task.py")
        path = path / "task.py"
    if not path.is_file():
        beside = path.parent.iterdir() if path.parent.is_dir() else ()
        raise TaskError(f"task: no file {path}{nearest(path.name, [entry.name for entry in beside])}")
    if path.suffix != ".py":
        raise TaskError(f"task: {path} is no Python file; expected TASK.py, or a folder that holds task.py")
    return path.resolve()


def _setting_names(function: Callable[..., Any], positional: int) -> list[str]:
    parameters = list(inspect.signature(function).parameters.values())
    return [
        parameter.name
        for parameter in parameters[positional:]
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]


def _bind(
    functions: Mapping[str, Callable[..., Any]], sets: dict[str, Any]
) -> tuple[dict[str, Setting], Recipe, dict[str, str]]:
    counts = dict((*REQUIRED, *OPTIONAL))
    settings: dict[str, Setting] = {}
    for name, function in functions.items():
        parameters = inspect.signature(function).parameters
        for key in _setting_names(function, counts[name]):
            default = parameters[key].default
            if default is inspect.Parameter.empty and key not in sets:
                raise TaskError(
                    f"task: {name}() has the setting {key!r} without a default; give one, or --set {key}=..."
                )
            if key in sets:
                settings[key] = Setting(_typed(key, sets[key], default), "--set")
            elif key not in settings:
                settings[key] = Setting(default, "task default")
            elif settings[key] != Setting(default, "task default") and settings[key].origin != "--set":
                raise TaskError(f"task: the setting {key!r} has different defaults in two functions; make them one")
    fields = Recipe.field_names()
    unknown = [key for key in sets if key not in settings and key not in fields]
    if unknown:
        valid = sorted({*settings, *fields})
        raise TaskError(f"--set {unknown[0]}: no such setting{nearest(unknown[0], valid)}; valid: {', '.join(valid)}")
    return settings, *_bind_recipe(functions["recipe"], settings, sets)


def _bind_recipe(
    function: Callable[..., Any], settings: Mapping[str, Setting], sets: Mapping[str, Any]
) -> tuple[Recipe, dict[str, str]]:
    names = _setting_names(function, 0)
    recipe = function(**{name: settings[name].value for name in names})
    if not isinstance(recipe, Recipe):
        raise RecipeError(f"task: recipe() must return a stretto.Recipe, got {type(recipe).__name__}")
    defaults = {each.name: each.default for each in dataclasses.fields(Recipe)}
    direct = {key: _typed(key, sets[key], getattr(recipe, key)) for key in sets if key in defaults and key not in names}
    recipe = dataclasses.replace(recipe, **direct)
    origins = {
        key: "--set" if key in sets else "task" if getattr(recipe, key) != default else "default"
        for key, default in defaults.items()
    }
    return recipe, origins


def _typed(key: str, given: Any, default: Any) -> Any:
    """``given`` (YAML where it is text) as the type of ``default``; an int serves for a float."""
    try:
        value = yaml.safe_load(given) if isinstance(given, str) and not isinstance(default, str) else given
    except yaml.YAMLError as error:
        raise TaskError(f"--set {key}={given}: {one_line(error)}") from error
    if not isinstance(default, str) and str(value).lower().lstrip(".+-") == "nan":
        raise TaskError(f"--set {key}={given}: nan is no number to compute with; give another value")
    if value is None or default is inspect.Parameter.empty:
        return value
    number_as_text = default is None and isinstance(value, str)
    if number_as_text or (isinstance(default, float) and not isinstance(value, bool) and isinstance(value, int | str)):
        try:  # YAML reads 3e-4 as text
            return float(value)
        except ValueError:
            pass
    as_tuple = isinstance(default, tuple) and isinstance(value, list)
    if default is not None and type(value) is not type(default) and not as_tuple:
        raise TaskError(f"--set {key}={given}: expected {type(default).__name__} like {default!r}, got {value!r}")
    return tuple(value) if isinstance(default, tuple) else value
