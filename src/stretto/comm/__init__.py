"""What passes between processes: collectives of one membership epoch, and framed messages."""
