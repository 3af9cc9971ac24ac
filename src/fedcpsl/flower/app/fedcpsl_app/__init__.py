"""FedCPSL as a Flower app; everything it does is in the installed fedcpsl."""
