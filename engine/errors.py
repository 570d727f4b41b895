"""The errors of loading a model."""


class ModelLoadError(Exception):
    """A model cannot be loaded or cannot be served; the message is for the user."""


class QuantizationError(ValueError):
    """A checkpoint is quantised in a way that is not supported, or damaged. The message goes on from its
    name."""
