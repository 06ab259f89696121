"""Allocations that need no search: where a search starts, and what it has to beat.

Named shapes (`named`), per-layer scores that are measured on the frozen model (`alphalora` from its
weights alone, `gradient` and `representation` from a few rows of the task as well; `measure`), and
what people bring as a file (`given`). Scores become experts in `scores`.

Influence scores (LayerIF, arXiv 2505.23811) are left out. Its authors report 403 seconds a layer
for 300 x 50 rows on a 7B model, after the training of an adapter to begin with. What is affordable
of it is the first-order influence at the adapter's initialisation, the inner product of a layer's
gradients on training and on validation rows. On the built-in model it orders the 32 layers as
`gradient` does (rank correlation 0.97; two seeds of `gradient` agree at 0.97), so it would add
nothing. `python benchmarks/priors.py` prints it.
"""
