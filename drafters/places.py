"""Where a position of a sequence lies in a pool over the engine's pages."""

from __future__ import annotations

import torch

from engine.batch import Tokens


def places(pages: Tokens, positions: torch.Tensor, page_size: int) -> torch.Tensor:
    """Rows of a pool that hold these positions [...] of a sequence, whose pages are [n]."""
    own = torch.from_numpy(pages).to(positions.device).long()[positions // page_size]
    return own * page_size + positions % page_size
