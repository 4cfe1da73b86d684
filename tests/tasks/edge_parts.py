"""Models at the edge of what workers can share: hardly any parameters, none that lie together, all frozen but a few;
and models and optimizers that write where others read. ``kind`` and ``optim`` choose."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, TensorDataset

from stretto.recipe import Recipe
from stretto.task import Params

WIDTH = 3


class Edge(nn.Module):
    """[batch, 3] to [batch]."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.kind = kind
        layer = nn.Linear(width, width)
        if kind == "tiny":
            self.w = nn.Parameter(torch.tensor([0.3, -0.2, 0.5]))
        elif kind == "scalar":
            self.w = nn.Parameter(torch.tensor(0.3))
        elif kind == "sparse":
            self.table = nn.Embedding(8, width, sparse=True)
        elif kind == "frozen":
            self.parts = nn.Sequential(*(nn.Linear(width, width) for _ in range(12))).requires_grad_(False)
            self.parts[6].bias.requires_grad_(True)
        elif kind == "threads":
            self.parts = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        elif kind in ("view", "buffer", "frozen view"):
            self.w = nn.Parameter(layer.weight.data, requires_grad=kind != "frozen view")
            self.b = nn.Parameter(torch.zeros(width))
            rows = self.w.data[:2]
            if kind == "buffer":
                self.register_buffer("rows", rows)
            else:
                self.rows = nn.Parameter(rows, requires_grad=kind == "view")
        elif kind == "columns":
            self.w, self.v = map(nn.Parameter, torch.randn(width, 6).chunk(2, 1))
        else:
            self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        x = x.repeat(1, -(-self._width() // WIDTH))[:, : self._width()]
        out: Tensor
        if self.kind == "tiny":
            out = x @ self.w
        elif self.kind == "scalar":
            out = x.sum(-1) * self.w
        elif self.kind == "sparse":
            out = self.table((x[:, 0] * 10).long().abs() % 8).sum(-1)
        elif self.kind == "frozen":
            out = torch.tanh(self.parts(x)).sum(-1)
        elif self.kind == "threads":
            out = self._together(x).sum(-1)
        elif self.kind in ("view", "buffer", "frozen view"):
            out = (x @ self.w + self.b).sum(-1) + (x @ self.rows.t()).sum(-1)
        elif self.kind == "columns":
            out = (x @ self.w * (x @ self.v)).sum(-1)
        else:
            self._write()
            out = torch.tanh(self.layer(x)).sum(-1)
        return out

    def _width(self) -> int:
        return self.parts[0].in_features if self.kind == "frozen" else WIDTH

    def _write(self) -> None:
        weight = self.layer.weight
        if self.kind == "normalises":
            weight.data.div_(weight.data.norm())
        elif self.kind == "rebinds":
            weight.data = weight.data / weight.data.norm()

    def _together(self, x: Tensor) -> Tensor:
        found: list[Tensor] = []
        lock = threading.Lock()

        def run(part: nn.Module) -> None:
            out = torch.tanh(part(x))
            with lock:
                found.append(out)

        threads = [threading.Thread(target=run, args=(part,)) for part in self.parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return torch.stack(found).sum(0)


class Rebinding(Optimizer):
    """SGD as it was once written: it puts a new tensor in place of the old one."""

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """``p.data = p.data - ...``."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = p.data - group["lr"] * p.grad


def model(kind: str = "plain", width: int = WIDTH) -> nn.Module:
    return Edge(kind, width)


def data(length: int = 30) -> Dataset[tuple[Tensor, ...]]:
    x = torch.randn(length, WIDTH, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(1).sin())


def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return (output - batch[1].to(output.dtype)).square().sum(), torch.tensor(len(batch[1]))


def optimizer(params: Params, optim: str = "Adam") -> Optimizer:
    trained = [p for p in params if p.requires_grad]
    made: Optimizer = (Rebinding if optim == "Rebinding" else getattr(torch.optim, optim))(trained, lr=0.05)
    return made


def recipe(batch: int = 7, steps: int = 5) -> Recipe:
    return Recipe(batch=batch, steps=steps, clip=0.5)
