"""Every private name of torch that this package uses."""
