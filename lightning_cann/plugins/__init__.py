"""Lightning plugins and what the strategies put around loggers and progress bar."""

from lightning_cann.plugins.logger_relay import LoggerRelay
from lightning_cann.plugins.progress_bar import promote_progress_bar, set_train_total

__all__ = ["LoggerRelay", "promote_progress_bar", "set_train_total"]
