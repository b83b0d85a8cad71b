"""Load-balanced long-context training for PyTorch Lightning (SparseBalance, arXiv 2604.13847)."""

__all__ = ["__version__"]
__version__ = "0.1.0"
