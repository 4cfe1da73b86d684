"""Training systems: what each does that decides a step's time and memory, as facts, none of them fitted."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import ClassVar, Final, Literal

import yaml
from pydantic import ConfigDict, TypeAdapter

from stretto.planner.cut import Stages

_STRICT: Final = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class Activations:
    """What a layer keeps for backward, beside what any has to.

    Args:
        gathered: with ``parallel_sequence``, a layer's inputs that were gathered are kept whole: ``never`` (they are
            gathered again), ``always``, or ``behind``: until the device has caught up with the host, which it never
            does where layers take it longer than the host, or the host needn't wait for messages of other stages.
        dropout: masks, of a byte an element, and what they were put on.
        projections: queries and keys before their rotation too, since values lie in one block with them.
        compiled: operations between products run as one, and the products' inputs are computed again.
        logit_copies: in float32, of each of the output layer's results, at once; beside one in the compute type.
        selective: what is computed again: ``attention``, or half of the ``products``.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    gathered: Literal["never", "behind", "always"] = "never"
    dropout: bool = False
    projections: bool = False
    compiled: bool = False
    logit_copies: int = 3
    selective: Literal["attention", "products"] = "attention"


@dataclass(frozen=True)
class States:
    """What is kept from step to step, and sent.

    Args:
        gradient_bytes: of an element of a gradient between microbatches.
        optimizer_bytes: that the optimizer keeps of a parameter, its float32 copy too where the model's isn't one.
        weights_apart: with ``zero=3`` the model's weights lie in parts beside the optimizer's; else those are them.
        copy_bytes: of a parameter, in buffers for messages wherever gradients are sent.
        bucket_elements: of fixed buffers for messages, one of gradients and one of weights, wherever ``zero`` cuts.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    gradient_bytes: int = 4
    optimizer_bytes: int = 12
    weights_apart: bool = True
    copy_bytes: int = 0
    bucket_elements: float = 0


@dataclass(frozen=True)
class Software:
    """One training system; the defaults are stretto's.

    Args:
        flash: attention doesn't write its square.
        sequence: activations beside layers that ``tp`` cuts lie in parts.
        stages: how layers are cut into them; see :mod:`stretto.planner.cut`.
        gradient_bytes: of an element of a gradient that is sent.
        zero: what it cuts over dp where a row doesn't say it.
        overlapped: gradients are added up while the last microbatch's backward makes others, where ``zero`` isn't 3.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    flash: bool = True
    sequence: bool = False
    stages: Stages = "shortest"
    gradient_bytes: int = 4
    zero: int = 0
    overlapped: bool = False
    activations: Activations = Activations()
    states: States = States()


@cache
def read_software() -> dict[str, Software]:
    """All that are known, by name."""
    text = (files("stretto.planner") / "data" / "software.yaml").read_text(encoding="utf-8")
    return TypeAdapter(dict[str, Software]).validate_python(yaml.safe_load(text))
