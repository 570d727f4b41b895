"""The errors that a user of the engine sees before a model runs."""


class ModelLoadError(Exception):
    """A model cannot be loaded or cannot be served; the message is for the user."""


class QuantizationError(ValueError):
    """A checkpoint is damaged, or quantised in a way that is not supported. The message continues a sentence
    that begins with the checkpoint's name."""


class ConfigError(ValueError):
    """The configuration cannot be used; the message is meant for the person who wrote it."""
