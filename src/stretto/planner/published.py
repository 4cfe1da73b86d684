"""Rows of published measurements: what was trained on what, and how long a step took."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

from pydantic import ValidationError

from stretto.errors import UserError
from stretto.planner.cut import Stages
from stretto.planner.hardware import Device, Machines, find_device
from stretto.planner.rows import Batch, Model, Parallel, Result, Row, read_lines
from stretto.planner.setups import SCHEDULES
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
    *(("nemo", "megatron-core"), ("megatron-core", "megatron-core"), ("megatron core", "megatron-core")),
    *(("nanotron", "nanotron"), ("foundry", "llm-foundry"), ("internevo", "internevo"), ("torchtitan", "torchtitan")),
)
# What rows say of recomputation and their times refute: with it, layers of vTrain's single hosts would have their
# products at over the peak rate of the device, whatever else they do.
_REFUTED: Final = frozenset({"vtrain_single"})
# Of what names nothing: on these devices what wrote attention's square to memory, elsewhere what came after it.
_OLDER: Final = frozenset({"volta", "ampere"})
_RECOMPUTE: Final = ("none", "full", "selective")
_KNOWN_SCHEDULES: Final = MappingProxyType(
    {"1f1b": "1f1b", "1f1b-i": "1f1b", "interleaved": "1f1b", "gpipe": "gpipe", "afab": "gpipe", "zb-h1": "zero-bubble"}
)
_WIDE: Final = ("fp32", "tf32")  # elements of 4 bytes
# Words by which rows say what a figure of memory means; a source that has others, of a figure that can't be else.
_KINDS: Final[tuple[tuple[str, Kind], ...]] = (
    ("nvidia-smi", "total"),
    ("reserved", "reserved"),
    ("allocated", "allocated"),
)
_KNOWN_KINDS: Final[Mapping[str, Kind]] = MappingProxyType({"bigscience_bloom_tuning": "total"})  # 80 of 80 GB


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
    rows = read_lines(path)
    layers = _measured_layers(rows)
    for row in rows:
        source = row.get("source")
        yield source if isinstance(source, str) else "", _read(row, layers)


def _layer_key(name: str, tp: int, sequence: int, wide: bool) -> tuple[Any, ...]:
    return name, tp, sequence, wide


def _measured_layers(rows: Iterable[dict[str, Any]]) -> dict[tuple[Any, ...], float]:
    """Bytes of a token that a layer was measured to keep, by ``_layer_key``."""
    found = {}
    for row in rows:
        try:
            batch, wide = row["batch"], _precision(str(row.get("precision", ""))) in _WIDE
            key = _layer_key(row["model"]["name"], row["parallel"]["tp"], batch["seq"], wide)
            found[key] = float(row["result"]["layer_act_mem_bytes"]) / (batch["micro"] * batch["seq"])
        except (KeyError, TypeError, ValueError, ArithmeticError):
            continue
    return found


def _read(values: dict[str, Any], layers: Mapping[tuple[Any, ...], float]) -> Published | str:
    if values.get("kind") == "microbench":
        return "a part of a step, not a step"
    try:
        row = Row.model_validate(values)
        device = find_device(row.hardware.gpu)
    except ValidationError as error:
        return f"a field is missing or isn't of its kind: {'.'.join(map(str, error.errors()[0]['loc']))}"
    except UserError as error:
        return str(error)
    odd, precision, source = _odd(row), _precision(row.precision), row.source or ""
    if odd or precision is None:
        return odd or f"precision {row.precision!r} isn't known"
    model, hardware, result, notes = row.model, row.hardware, row.result, row.notes or ""
    software = SOFTWARE.get(source) or _software_of(notes, device)
    if software == "torchtitan" and "torch.compile" in notes:
        software = "torchtitan-compiled"
    system, per_host = read_software()[software], hardware.per_node or 8
    network = _network(hardware.inter, per_host) or device.network_rate
    return Published(
        source=source,
        name=model.name,
        model=_transformer(model, row.batch),
        machines=Machines(device, hardware.count, per_host, network),
        precision=precision,
        software=software,
        stages=system.stages,
        setup=_setup(row, system, precision in _WIDE),
        seconds=result.iter_s,
        memory_bytes=_memory(result),
        memory_kind=_memory_kind(source, result, notes),
        memory_first="rank 0" in notes,
        cut=_stages(row.parallel, model.layers),
        layer_bytes=layers.get(_layer_key(model.name, row.parallel.tp, row.batch.seq, precision in _WIDE)),
        fits=result.status is None,
        certain="crash" not in (result.status or ""),
    )


def _odd(row: Row) -> str:
    """Why the row can't be predicted though its fields are what they must be; empty: it can."""
    model, parallel, batch = row.model, row.parallel, row.batch
    if model.vocab is None or model.heads is None:
        return f"{'vocab' if model.vocab is None else 'heads'} isn't said"
    if (parallel.cp or 1) > 1 or (parallel.ep or 1) > 1:
        return "context and expert parallelism aren't predicted yet"
    if parallel.world_size != row.hardware.count:
        return f"dp x tp x pp is {parallel.world_size}, and it had {row.hardware.count} devices"
    if parallel.dp % parallel.shard:
        return f"zero_group {parallel.shard} doesn't divide dp {parallel.dp}"
    if batch.samples < parallel.dp * batch.micro:
        return "its batch is less than one microbatch of each rank"
    if row.result.status is not None and parallel.dp * batch.micro * (batch.grad_accum or 0) not in (0, batch.samples):
        return "its batch isn't its microbatches, which alone may have stopped it"
    if not row.recompute.startswith(_RECOMPUTE):
        return f"recompute {row.recompute!r} isn't known"
    if parallel.pp > 1 and _schedule(parallel.schedule) is None:
        return f"schedule {parallel.schedule!r} isn't known"
    return ""


def _transformer(model: Model, batch: Batch) -> Transformer:
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


def _setup(row: Row, system: Software, wide: bool) -> dict[str, Any]:
    parallel, batch, precision = row.parallel, row.batch, row.precision.lower()
    recompute = "none" if row.source in _REFUTED else row.recompute
    sequence = system.sequence if parallel.sp is None else parallel.sp
    return {
        "dp": parallel.dp,
        "tp": parallel.tp,
        "pp": parallel.pp,
        "chunks": parallel.interleave or 1,
        "schedule": SCHEDULES.index(_schedule(parallel.schedule) or "1f1b"),
        "zero": system.zero if parallel.zero is None else parallel.zero,
        "shard": parallel.shard,
        "micro": batch.micro,
        "microbatches": batch.samples / parallel.dp / batch.micro,
        "sequence": batch.seq,
        "parallel_sequence": bool(sequence) and parallel.tp > 1,
        "full": recompute.startswith("full"),
        "selective": recompute.startswith("selective"),
        "half": recompute.startswith("selective") and system.activations.selective == "products",
        "flash": system.flash,
        "hidden": bool(parallel.async_tp),
        "overlapped": system.overlapped,
        "fp8": "fp8" in precision,
        "rowwise": "rowwise" in precision,
        "compute_bytes": 4 if wide else 2,
        "gradient_bytes": 4 if wide else system.gradient_bytes,
    }


def _software_of(notes: str, device: Device) -> str:
    unsaid = "megatron-lm" if device.family in _OLDER else "megatron-core"
    return next((name for word, name in _NAMED if word in notes.lower()), unsaid)


def _precision(text: str) -> str | None:
    """Of the products of matrices; those that are in 8 bits are so beside others in 16."""
    low = text.lower()
    if low.startswith("fp32"):
        return "tf32" if "tf32" in low else "fp32"
    if "bf16" in low:
        return "bf16"
    return "fp16" if any(word in low for word in ("fp16", "fp8", "mixed")) else None


def _schedule(text: str | None) -> str | None:
    """Of a pipeline; where several stages stand on a rank, it is how many that says so."""
    return _KNOWN_SCHEDULES.get((text or "1f1b").lower())


def _network(text: str | None, per_host: int) -> float | None:
    """Bytes/s a device; None: it isn't said; from words such as ``8x200 Gb/s HDR IB per node``."""
    if not text:
        return None
    if found := re.search(r"(\d+)\s*x\s*(\d+)\s*Gb/s", text):
        return int(found[1]) * int(found[2]) * 1e9 / 8 / per_host
    if found := re.search(r"(\d+)\s*Gb/s per (GPU|node)", text, re.IGNORECASE):
        return int(found[1]) * 1e9 / 8 / (1 if found[2].lower() == "gpu" else per_host)
    return None


def _memory(result: Result) -> float | None:
    """Bytes. What people call GB of memory they have read from tools that count in 2**30."""
    known = (result.mem_gb, result.mem_gib_max, result.mem_gib_nvidia_smi)
    return next((2**30 * value for value in known if value is not None), None)


def _memory_kind(source: str, result: Result, notes: str) -> Kind:
    if known := _KNOWN_KINDS.get(source):
        return known
    said = "nvidia-smi" if result.mem_gib_nvidia_smi is not None else notes.lower()
    return next((kind for word, kind in _KINDS if word in said), "reserved")


def _stages(parallel: Parallel, layers: int) -> tuple[int, ...] | None:
    """Layers of each stage; where the embedding and the output layer are counted among them, without those."""
    found = parallel.stage_layers
    if not found or len(found) != parallel.pp or sum(found) not in (layers, layers + 2):
        return None
    ends = (sum(found) - layers) // 2
    return tuple(count - ends * ((at == 0) + (at == len(found) - 1)) for at, count in enumerate(found))


def steps_of(rows: Iterable[tuple[str, Published | str]]) -> list[Published]:
    """Those whose step was timed."""
    return [row for _, row in rows if isinstance(row, Published) and row.seconds]
