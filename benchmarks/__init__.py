"""Time and memory of CoCA beside rotary attention; every result is checked before it is timed."""
