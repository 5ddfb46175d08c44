"""Optimisers over plain or client-stacked parameters, and orthogonalisation."""
