"""The factor of clipping, for the examination and for the judge."""

USUAL_NORMS = (1.0, 0.5, 0.25, 0.1, 5.0)  # libraries clip to these by default, and people most of the time


def factor_of_norm(norm: float, clip_norm: float) -> float:
    """Returns the factor by which clipping multiplies gradients of this norm (``torch.nn.utils.clip_grad_norm_``)."""
    return min(1.0, clip_norm / (norm + 1e-6))
