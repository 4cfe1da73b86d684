"""A transformer as its sizes: what a plan's time and memory are counted from where no model can be run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Transformer:
    """A decoder of equal layers.

    Args:
        layers: how many.
        hidden: features of a token between layers.
        heads: of attention; ``kv_heads`` of keys and values, fewer where heads share them.
        ffn: features inside a feed-forward layer.
        vocab: tokens that there are.
        gated: the feed-forward layer has two matrices up (SwiGLU), not one.
        tied: the output layer is the embedding.
        positions: learned ones, as many as a sequence may be long; 0: none.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    gated: bool = False
    tied: bool = True
    positions: int = 0

    @property
    def ups(self) -> int:
        """Matrices from hidden to ffn in a layer."""
        return 2 if self.gated else 1

    @property
    def kv_hidden(self) -> float:
        """Features of a token's keys, and of its values."""
        return self.hidden * self.kv_heads / self.heads

    @property
    def layer_matrices(self) -> float:
        """Elements of a layer's matrices; what else it has is a thousandth of them."""
        return self.hidden * (2 * self.hidden + 2 * self.kv_hidden) + self.hidden * self.ffn * (1 + self.ups)

    @property
    def layer_parameters(self) -> float:
        """Elements of a layer, with its biases and norms."""
        return self.layer_matrices + 4 * self.hidden + (0 if self.gated else 5 * self.hidden + self.ffn)

    @property
    def table(self) -> float:
        """Elements of the embedding, and of the output layer where it is another."""
        return float(self.vocab * self.hidden)

    @property
    def parameters(self) -> float:
        """All elements."""
        tables = self.table * (1 if self.tied else 2) + self.positions * self.hidden
        return self.layers * self.layer_parameters + tables

    def flops_per_token(self, sequence: int) -> float:
        """Of forward and backward, without what is computed again: 6 for each element of a matrix, and attention's two
        products over the whole square (arXiv 2104.04473, appendix)."""
        return 6 * (self.layers * self.layer_matrices + self.table) + 12 * self.layers * sequence * self.hidden
