"""Orthogonalise a batch of matrices by Newton-Schulz iterations (the core of Muon).

Shape legend: N matrices, R rows, C columns.
"""

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Quintic that drives singular values of a normalised matrix into about [0.7, 1.2] in 5 steps."""


def orthogonalize(m_NRC: Tensor, *, steps: int = 5, eps: float = 1e-7) -> Tensor:
    """An approximation of U V^T for each matrix M = U S V^T.

    m_NRC: [N, R, C]; computed in its dtype (float32 on a CPU). A zero matrix stays zero. Works on
    the side with fewer rows, since M and M^T have the same orthogonal factor up to transposition.
    """
    a, b, c = COEFFICIENTS
    transposed = m_NRC.shape[-2] > m_NRC.shape[-1]
    x = m_NRC.mT if transposed else m_NRC
    # norm in float32 whatever the dtype: the sum of squares of a large bfloat16 block loses bits
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.float32)
    x = (x / (norm + eps).to(x.dtype)).contiguous()
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        poly = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, poly, x, beta=a)
    return x.mT if transposed else x
