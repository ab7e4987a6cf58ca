"""Real models to try accel on; each factory declares its own inputs."""
