"""What a training run or a deployment takes, before anything is launched: memory, communication, time."""
