"""FedCPSL as a scikit-learn classifier."""

from fedcpsl.sklearn.classifier import FedCPSLClassifier

__all__ = ["FedCPSLClassifier"]
