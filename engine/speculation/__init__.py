"""Decides who drafts in a round, and how much: whatever promises the most tokens per second."""
