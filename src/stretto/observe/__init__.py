"""What a run tells about itself: plain files that outlive it."""

from stretto.observe.events import EventLog
from stretto.observe.memory import peak_rss_bytes, rss_bytes

__all__ = ["EventLog", "peak_rss_bytes", "rss_bytes"]
