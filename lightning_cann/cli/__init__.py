"""The command ``cann-train``.  See ``__main__`` for the dispatcher."""
