"""From a plan to kernel launches."""
