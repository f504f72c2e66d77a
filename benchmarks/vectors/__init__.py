"""The specification's vectors, played on other packages' gradient accumulation."""
