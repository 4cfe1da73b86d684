"""Rows of published measurements: what was trained on what, and how long a step took."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from stretto.errors import UserError
from stretto.planner.hardware import Device, Machines, find_device
from stretto.planner.transformer import Transformer

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
    async_tp: bool | None = None


class _Batch(_Part):
    micro: int
    seq: int
    global_: int

    @classmethod
    def read(cls, values: dict[str, Any]) -> _Batch:
        return cls(micro=values["micro"], seq=values["seq"], global_=values["global"])


@dataclass(frozen=True)
class Published:
    """One measurement.

    Args:
        cell: what it is compared with others in: the model and how many devices.
        software: the training system, by the name that constants have.
        setup: fields of :class:`Setups`.
        seconds: of a step; None: it isn't said.
        memory_bytes: the most that a device had in use; ``fits``: whether the run came through.
    """

    source: str
    name: str
    model: Transformer
    machines: Machines
    precision: str
    software: str
    balanced: bool
    setup: dict[str, Any]
    seconds: float | None
    memory_bytes: float | None
    fits: bool = True

    @property
    def device(self) -> Device:
        """What it ran on."""
        return self.machines.device


def read_software() -> dict[str, dict[str, Any]]:
    """What is known of each training system."""
    text = (files("stretto.planner") / "data" / "software.yaml").read_text(encoding="utf-8")
    found: dict[str, dict[str, Any]] = yaml.safe_load(text)
    return found


def read_rows(path: Path) -> Iterator[tuple[str, Published | str]]:
    """Of each row its source, and what it measured or why it is skipped.

    Raises:
        UserError: the file can't be read, or a line is no JSON object.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} can't be read: {error}") from error
    systems = read_software()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"{path}, line {number}: expected a JSON object, got {line[:60]!r}") from error
        if not isinstance(row, dict):
            raise UserError(f"{path}, line {number}: expected a JSON object, got {line[:60]!r}")
        yield str(row.get("source", "")), _read(row, systems)


def _read(row: dict[str, Any], systems: dict[str, dict[str, Any]]) -> Published | str:
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
    software = SOFTWARE.get(row.get("source", "")) or _software_of(str(row.get("notes", "")))
    if software == "torchtitan" and "torch.compile" in str(row.get("notes", "")):
        software = "torchtitan-compiled"
    system = systems[software]
    per_host = hardware.per_node or 8
    network = _network(hardware.inter, per_host) or device.network_rate
    machines = Machines(device, hardware.count, per_host, network)
    result = row.get("result", {})
    return Published(
        source=str(row.get("source", "")),
        name=model.name,
        model=_transformer(model, batch),
        machines=machines,
        precision=_precision(str(row.get("precision", ""))),
        software=software,
        balanced=bool(system["balanced"]),
        setup=_setup(row, parallel, batch, system),
        seconds=result.get("iter_s"),
        memory_bytes=_memory(result),
        fits=result.get("status") is None,
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


def _setup(row: dict[str, Any], parallel: _Parallel, batch: _Batch, system: dict[str, Any]) -> dict[str, Any]:
    recompute = "none" if row.get("source") in _REFUTED else str(row.get("recompute") or "none")
    sequence = system["sequence"] if parallel.sp is None else parallel.sp
    wide = _precision(str(row.get("precision", ""))) in ("fp32", "tf32")
    return {
        "dp": parallel.dp,
        "tp": parallel.tp,
        "pp": parallel.pp,
        "chunks": parallel.interleave or 1,
        "zero": parallel.zero or 0,
        "micro": batch.micro,
        "microbatches": max(1.0, batch.global_ / parallel.dp / batch.micro),
        "sequence": batch.seq,
        "parallel_sequence": bool(sequence) and parallel.tp > 1,
        "full": recompute.startswith("full"),
        "selective": recompute.startswith("selective"),
        "half": recompute.startswith("selective") and bool(system.get("half")),
        "flash": bool(system["flash"]),
        "hidden": bool(parallel.async_tp),
        "fp8": "fp8" in str(row.get("precision", "")).lower(),
        "rowwise": "rowwise" in str(row.get("precision", "")).lower(),
        "compute_bytes": 4 if wide else 2,
        "gradient_bytes": 4 if wide else system["gradient_bytes"],
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
    if (found := result.get("mem_gb")) is not None:
        return 1e9 * float(found)
    found = result.get("mem_gib_max") or result.get("mem_gib_nvidia_smi")
    return None if found is None else 2**30 * float(found)


def steps_of(rows: Iterable[tuple[str, Published | str]]) -> list[Published]:
    """Those whose step was timed."""
    return [row for _, row in rows if isinstance(row, Published) and row.seconds]
