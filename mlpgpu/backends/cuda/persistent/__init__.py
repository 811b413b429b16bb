"""Small networks trained inside one kernel: what of a plan it holds, its tiles, its memory, its cost."""
