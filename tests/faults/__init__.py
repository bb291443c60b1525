"""Programs that are killed, starved and corrupted, each in a process of its own."""
