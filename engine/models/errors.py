"""The one error of loading a model."""


class ModelLoadError(Exception):
    """A model cannot be loaded or cannot be served; the message is for the user."""
