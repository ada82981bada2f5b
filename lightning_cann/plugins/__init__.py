"""Lightning plugins and what the strategies put around loggers and progress bar."""

from lightning_cann.plugins.logger_relay import LoggerRelay, promote_progress_bar

__all__ = ["LoggerRelay", "promote_progress_bar"]
