"""Windows that several workers share."""
