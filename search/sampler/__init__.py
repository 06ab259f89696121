"""The samplers: proposals of whole allocations, every one in the budget."""

from search.sampler.budget import (
    SAMPLERS,
    BudgetExhausted,
    BudgetSampler,
    make_sampler,
    posterior_means,
    remaining,
)

__all__ = [
    "SAMPLERS",
    "BudgetExhausted",
    "BudgetSampler",
    "make_sampler",
    "posterior_means",
    "remaining",
]
