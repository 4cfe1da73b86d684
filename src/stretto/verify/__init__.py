"""The proof: a plan's numbers against those of one device, step by step, and where they part.

Nothing here imports torch before a worker runs.
"""

from stretto.verify.report import Divergence, PlanReport, VerifyReport
from stretto.verify.run import verify

__all__ = ["Divergence", "PlanReport", "VerifyReport", "verify"]
