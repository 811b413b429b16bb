"""Small networks that are trained inside one kernel."""
