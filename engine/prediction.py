"""Moved to ``engine.proposers.prediction``."""

from engine.proposers.prediction import TRUSTED_RUN, Prediction, PredictionCursor

__all__ = ["TRUSTED_RUN", "Prediction", "PredictionCursor"]
