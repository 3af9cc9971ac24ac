"""FedCPSL on Flower: the same functions on machines that hold their own data."""
