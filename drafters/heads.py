"""The sequential heads in torch: what slot k's logits gain from the token before it, and the confidence head.

B(x_{k-1}) = W1[x_{k-1}] W2 (vanilla), gated by h_k, or carried along the block by a recurrent state
(paper eq. 5 and 6; the gate is in DeepSpec's code only). c_k = sigmoid(w . [h_k; W1[x_{k-1}]]), which never
sees x_k (eq. 7 and 8).
"""

from __future__ import annotations

import torch
from torch import nn

from drafters.config import DraftConfig


class MarkovHead(nn.Module):
    """Vanilla, gated or recurrent, by `kind`; W1 over the target's vocabulary, W2 over the draft's."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        rank, hidden = config.rank, config.hidden_size
        self.kind, self.rank = config.head, rank
        self.markov_w1 = nn.Embedding(config.layers.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.vocab_size, bias=False)
        if config.head == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        elif config.head == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)
        nn.init.normal_(self.markov_w1.weight, std=0.02)
        nn.init.zeros_(self.markov_w2.weight)  # a fresh head adds nothing

    def step(
        self, embedded: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Slot k: W1[x_{k-1}] and state [n, r], hidden [n, d] -> (what W2 is applied to [n, r], state)."""
        e = embedded
        if self.kind == "gated":
            return torch.sigmoid(self.gate_proj(torch.cat((hidden, e), -1))) * e, state
        if self.kind == "rnn":
            gate, candidate, out = self.joint_proj(torch.cat((state, e, hidden), -1)).chunk(3, -1)
            keep = torch.sigmoid(gate)
            return torch.tanh(out), keep * state + (1.0 - keep) * torch.tanh(candidate)
        return e, state

    def forward(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Biases [A, n, V'] of whole blocks: W1[x_{k-1}] of known tokens [A, n, r], hidden [A, n, d]."""
        if self.kind != "rnn":
            mixed, _ = self.step(embedded, hidden, hidden)
        else:
            state = hidden.new_zeros(len(hidden), self.rank)
            rows = []
            for k in range(embedded.shape[1]):
                row, state = self.step(embedded[:, k], hidden[:, k], state)
                rows.append(row)
            mixed = torch.stack(rows, 1)
        out: torch.Tensor = self.markov_w2(mixed)
        return out


class ConfidenceHead(nn.Module):
    """Raw logit of the chance that slot k is accepted if those before it were."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.with_markov = config.confidence_with_markov
        self.proj = nn.Linear(config.confidence_size, 1)
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)

    def forward(self, hidden: torch.Tensor, previous: torch.Tensor | None) -> torch.Tensor:
        """hidden [..., d], previous [..., r] (W1 of the token before each slot) -> [...]."""
        x = torch.cat((hidden, previous), -1) if self.with_markov and previous is not None else hidden
        out: torch.Tensor = self.proj(x).squeeze(-1)
        return out
