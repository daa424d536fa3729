"""What the approximations of serving cost in quality, measured with the serving programs."""
