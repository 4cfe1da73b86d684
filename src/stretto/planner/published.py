"""Rows of published measurements: what was trained on what, and how long a step took."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from stretto.errors import UserError
from stretto.planner.cut import Stages
from stretto.planner.hardware import Device, Machines, find_device
from stretto.planner.software import Software, read_software
from stretto.planner.transformer import Transformer

Kind = Literal["allocated", "reserved", "total"]
# Sources whose training system the row itself doesn't name.
SOFTWARE: Final = MappingProxyType(
    {
        "hf_ultrascale_playbook": "nanotron",
        "hf_ultrascale_playbook_oom": "nanotron",
        "vtrain_single": "megatron-deepspeed",
        "bigscience_bloom_tuning": "megatron-deepspeed",
        "sailor_gh200": "megatron-deepspeed",
        "mosaicml_llm_foundry": "llm-foundry",
        "internevo": "internevo",
        "torchtitan": "torchtitan",
    }
)
_NAMED: Final = (
    ("megatron-deepspeed", "megatron-deepspeed"),
    *(("nanotron", "nanotron"), ("foundry", "llm-foundry"), ("internevo", "internevo"), ("torchtitan", "torchtitan")),
)
# What rows say of recomputation and their times refute: with it, layers of vTrain's single hosts would have their
# products at over the peak rate of the device, whatever else they do.
_REFUTED: Final = frozenset({"vtrain_single"})
_FALLBACK: Final = "megatron-lm"
_WIDE: Final = ("fp32", "tf32")  # elements of 4 bytes
# Words by which rows say what a figure of memory means; a source that has others, of a figure that can't be else.
_KINDS: Final[tuple[tuple[str, Kind], ...]] = (
    ("nvidia-smi", "total"),
    ("nvidia_smi", "total"),
    ("reserved", "reserved"),
    ("allocated", "allocated"),
)
_KNOWN_KINDS: Final[Mapping[str, Kind]] = MappingProxyType({"bigscience_bloom_tuning": "total"})  # 80 of 80 GB


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class _Model(_Part):
    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int | None = None
    kv_heads: int | None = None
    vocab: int | None = None
    mlp: str | None = None
    tied_embeddings: bool | None = None
    pos: str | None = None


class _Hardware(_Part):
    gpu: str
    count: int
    per_node: int | None = None
    inter: str | None = None


class _Parallel(_Part):
    dp: int
    tp: int
    pp: int
    cp: int | None = 1
    ep: int | None = 1
    zero: int | None = None
    interleave: int | None = None
    sp: bool | None = None
    schedule: str | None = None
    stage_layers: list[int] | None = None
    async_tp: bool | None = None


class _Batch(_Part):
    micro: int
    seq: int
    global_: int
    grad_accum: int | None = None

    @classmethod
    def read(cls, values: dict[str, Any]) -> _Batch:
        return cls(**{key: value for key, value in values.items() if key != "global"}, global_=values["global"])


@dataclass(frozen=True)
class Published:
    """One measurement.

    Args:
        cell: what it is compared with others in: the model and how many devices.
        software: the training system, by the name that constants have.
        setup: fields of :class:`Setups`.
        cut: layers on each stage; None: it isn't said.
        layer_bytes: that a layer was measured to keep of a token; None: it wasn't.
        seconds: of a step; None: it isn't said.
        memory_bytes: the most that was in use; of what is ``memory_kind``, and on the first stage where
            ``memory_first`` is true.
        fits: whether the run came through; ``certain``: if it didn't, that it was for memory.
    """

    source: str
    name: str
    model: Transformer
    machines: Machines
    precision: str
    software: str
    stages: Stages
    setup: dict[str, Any]
    seconds: float | None
    memory_bytes: float | None
    cut: tuple[int, ...] | None = None
    layer_bytes: float | None = None
    memory_kind: Kind = "reserved"
    memory_first: bool = False
    fits: bool = True
    certain: bool = True

    @property
    def device(self) -> Device:
        """What it ran on."""
        return self.machines.device


def read_rows(path: Path) -> Iterator[tuple[str, Published | str]]:
    """Of each row its source, and what it measured or why it is skipped.

    Raises:
        UserError: the file can't be read, or a line is no JSON object.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} can't be read: {error}") from error
    rows = [_parse(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    layers = _measured_layers(rows)
    for row in rows:
        yield str(row.get("source", "")), _read(row, layers)


def _parse(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{path}, line {number}: expected a JSON object, got {line[:60]!r}") from error
    if not isinstance(row, dict):
        raise UserError(f"{path}, line {number}: expected a JSON object, got {line[:60]!r}")
    return row


def _layer_key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    wide = _precision(str(row.get("precision", ""))) in _WIDE
    return row["model"]["name"], row["parallel"]["tp"], row["batch"]["seq"], wide


def _measured_layers(rows: Iterable[dict[str, Any]]) -> dict[tuple[Any, ...], float]:
    """Bytes of a token that a layer was measured to keep, by ``_layer_key``."""
    found = {}
    for row in rows:
        try:
            tokens = row["batch"]["micro"] * row["batch"]["seq"]
            found[_layer_key(row)] = float(row["result"]["layer_act_mem_bytes"]) / tokens
        except (KeyError, TypeError, ValueError):
            continue
    return found


def _read(row: dict[str, Any], layers: Mapping[tuple[Any, ...], float]) -> Published | str:
    if row.get("kind") == "microbench":
        return "a part of a step, not a step"
    try:
        model, hardware = _Model(**row["model"]), _Hardware(**row["hardware"])
        parallel, batch = _Parallel(**row["parallel"]), _Batch.read(row["batch"])
        device = find_device(hardware.gpu)
    except (KeyError, TypeError, ValidationError) as error:
        return f"a field is missing or isn't of its kind: {_first(error)}"
    except UserError as error:
        return str(error)
    if None in (model.vocab, model.heads):
        return f"{'vocab' if model.vocab is None else 'heads'} isn't said"
    if (parallel.cp or 1) > 1 or (parallel.ep or 1) > 1:
        return "context and expert parallelism aren't predicted yet"
    result = row.get("result") or {}
    accumulated = parallel.dp * batch.micro * (batch.grad_accum or 0)
    if result.get("status") is not None and accumulated not in (0, batch.global_):
        return "its batch isn't its microbatches, which alone may have stopped it"
    software = SOFTWARE.get(row.get("source", "")) or _software_of(str(row.get("notes", "")))
    if software == "torchtitan" and "torch.compile" in str(row.get("notes", "")):
        software = "torchtitan-compiled"
    system = read_software()[software]
    per_host = hardware.per_node or 8
    network = _network(hardware.inter, per_host) or device.network_rate
    machines = Machines(device, hardware.count, per_host, network)
    return Published(
        source=str(row.get("source", "")),
        name=model.name,
        model=_transformer(model, batch),
        machines=machines,
        precision=_precision(str(row.get("precision", ""))),
        software=software,
        stages=system.stages,
        setup=_setup(row, parallel, batch, system),
        seconds=result.get("iter_s"),
        memory_bytes=_memory(result),
        memory_kind=_memory_kind(row, result),
        memory_first="rank 0" in str(row.get("notes", "")),
        cut=_stages(parallel, model.layers),
        layer_bytes=layers.get(_layer_key(row)),
        fits=result.get("status") is None,
        certain="crash" not in str(result.get("status", "")),
    )


def _transformer(model: _Model, batch: _Batch) -> Transformer:
    assert model.heads is not None and model.vocab is not None
    return Transformer(
        layers=model.layers,
        hidden=model.hidden,
        heads=model.heads,
        kv_heads=model.kv_heads or model.heads,
        ffn=model.ffn,
        vocab=model.vocab,
        gated="glu" in (model.mlp or "").lower(),
        tied=bool(model.tied_embeddings),
        positions=batch.seq if model.pos == "learned" else 0,
    )


def _setup(row: dict[str, Any], parallel: _Parallel, batch: _Batch, system: Software) -> dict[str, Any]:
    recompute = "none" if row.get("source") in _REFUTED else str(row.get("recompute") or "none")
    sequence = system.sequence if parallel.sp is None else parallel.sp
    wide = _precision(str(row.get("precision", ""))) in _WIDE
    return {
        "dp": parallel.dp,
        "tp": parallel.tp,
        "pp": parallel.pp,
        "chunks": parallel.interleave or 1,
        "zero": system.zero if parallel.zero is None else parallel.zero,
        "micro": batch.micro,
        "microbatches": max(1.0, batch.global_ / parallel.dp / batch.micro),
        "sequence": batch.seq,
        "parallel_sequence": bool(sequence) and parallel.tp > 1,
        "full": recompute.startswith("full"),
        "selective": recompute.startswith("selective"),
        "half": recompute.startswith("selective") and system.activations.selective == "products",
        "flash": system.flash,
        "hidden": bool(parallel.async_tp),
        "fp8": "fp8" in str(row.get("precision", "")).lower(),
        "rowwise": "rowwise" in str(row.get("precision", "")).lower(),
        "compute_bytes": 4 if wide else 2,
        "gradient_bytes": 4 if wide else system.gradient_bytes,
    }


def _first(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return ".".join(map(str, error.errors()[0]["loc"]))
    return str(error).strip("'")


def _software_of(notes: str) -> str:
    return next((name for word, name in _NAMED if word in notes.lower()), _FALLBACK)


def _precision(text: str) -> str:
    low = text.lower()
    if low.startswith("fp32"):
        return "tf32" if "tf32" in low else "fp32"
    return "bf16" if "bf16" in low else "fp16"


def _network(text: str | None, per_host: int) -> float | None:
    """Bytes/s a device; None: it isn't said; from words such as ``8x200 Gb/s HDR IB per node``."""
    if not text:
        return None
    if found := re.search(r"(\d+)\s*x\s*(\d+)\s*Gb/s", text):
        return int(found[1]) * int(found[2]) * 1e9 / 8 / per_host
    if found := re.search(r"(\d+)\s*Gb/s per (GPU|node)", text, re.IGNORECASE):
        return int(found[1]) * 1e9 / 8 / (1 if found[2].lower() == "gpu" else per_host)
    return None


def _memory(result: dict[str, Any]) -> float | None:
    """Bytes. What people call GB of memory they have read from tools that count in 2**30."""
    known = (result.get(key) for key in ("mem_gb", "mem_gib_max", "mem_gib_nvidia_smi"))
    return next((2**30 * float(value) for value in known if value is not None), None)


def _memory_kind(row: dict[str, Any], result: dict[str, Any]) -> Kind:
    if known := _KNOWN_KINDS.get(str(row.get("source", ""))):
        return known
    said = " ".join((*(key for key, value in result.items() if value is not None), str(row.get("notes", "")).lower()))
    return next((kind for word, kind in _KINDS if word in said), "reserved")


def _stages(parallel: _Parallel, layers: int) -> tuple[int, ...] | None:
    """Layers of each stage; where the embedding and the output layer are counted among them, without those."""
    found = parallel.stage_layers
    if not found or len(found) != parallel.pp or sum(found) not in (layers, layers + 2):
        return None
    ends = (sum(found) - layers) // 2
    return tuple(count - ends * ((at == 0) + (at == len(found) - 1)) for at, count in enumerate(found))


def steps_of(rows: Iterable[tuple[str, Published | str]]) -> list[Published]:
    """Those whose step was timed."""
    return [row for _, row in rows if isinstance(row, Published) and row.seconds]
