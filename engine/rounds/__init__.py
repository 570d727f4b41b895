"""Executes steps, and measures how long they take."""
