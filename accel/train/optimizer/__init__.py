"""Updates the parameters: the optimizer with master weights, the loss scale, and the norm of the gradients.

Takes this rank's parameters and their gradients. Returns the optimizer's state for a checkpoint, and names the weight
or gradient that isn't finite.
"""
