"""What accel optimize tries for a target, how it judges a candidate, and which one it takes."""
