"""The training core: one config, one loop, one mesh; checkpoints that ``accel export`` takes as they are."""
