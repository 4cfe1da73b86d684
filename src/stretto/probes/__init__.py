"""Probes: small experiments before launch that find what would break the law in silence."""

from stretto.probes.optimizer import Reach, optimizer_reach
from stretto.probes.split import split_probe
from stretto.probes.verdict import Findings, refusal

__all__ = ["Findings", "Reach", "optimizer_reach", "refusal", "split_probe"]
