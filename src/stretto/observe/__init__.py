"""What a run tells about itself: plain files that outlive it."""

from stretto.observe.events import EventLog
from stretto.observe.lanes import Lanes, Noted
from stretto.observe.memory import allocator, free_bytes, give_back, peak_rss_bytes, rss_bytes

__all__ = ["EventLog", "Lanes", "Noted", "allocator", "free_bytes", "give_back", "peak_rss_bytes", "rss_bytes"]
