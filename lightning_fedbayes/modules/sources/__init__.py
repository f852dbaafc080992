"""Sources of posteriors for networks as they are: the optimizer IVON, curvature of the loss, and the training path."""
