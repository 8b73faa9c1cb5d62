"""One folder a task: what it measures, its pure parts, and its README."""
