"""The factor of clipping, for those who examine it and those who judge it."""


def factor_of_norm(norm: float, clip_norm: float) -> float:
    """Returns the factor by which clipping multiplies gradients of this norm (``torch.nn.utils.clip_grad_norm_``)."""
    return min(1.0, clip_norm / (norm + 1e-6))
