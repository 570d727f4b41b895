"""The fixtures of the server's tests, for faults that need no model."""

from tests.server.conftest import model_folder, no_settings_from_outside, start_server, tokenizer

__all__ = ["model_folder", "no_settings_from_outside", "start_server", "tokenizer"]
