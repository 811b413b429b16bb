"""The third pass: launches with their arguments, one module for each family of groups."""
