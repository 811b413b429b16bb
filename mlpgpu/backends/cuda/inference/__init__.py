"""Predictions on a card: a network lowered, compiled and loaded once, and arrays that flow through it."""
